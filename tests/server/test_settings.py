"""Settings of `leasehold serve`: three sources, one table, and errors that name what is known."""

from pathlib import Path

import pytest

from leasehold.errors import ConfigError
from leasehold.server import settings
from leasehold.server.settings import SETTINGS, LimitSettings, Settings, read

EXAMPLE = """
engine = "redis://10.0.0.5/0"
listen = ["0.0.0.0:7420", "unix:/run/leasehold.sock"]
workers = 4
call_timeout = 5.0
[tls]
cert = "/etc/leasehold/server.pem"
key = "/etc/leasehold/server.key"
client_ca = "/etc/leasehold/clients.pem"
[auth]
keys = "/etc/leasehold/keys.toml"
[limits]
connections = 10_000
waiters = 20_000
waiters_per_key = 2_000
calls = 2_000
wait = 60.0
[audit]
file = "/var/log/leasehold/audit.jsonl"
required = false
"""


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "leasehold.toml"
        path.write_text(text)
        path.chmod(0o600)
        return path

    return write


def test_defaults_listen_on_loopback_without_authentication():
    found = read({}, {}, None)
    assert found == Settings()
    assert found.listen == ("127.0.0.1:7420",)
    assert not found.authenticates


def test_example_file_is_read(config):
    found = read({}, {}, config(EXAMPLE))
    assert found.engine == "redis://10.0.0.5/0"
    assert found.listen == ("0.0.0.0:7420", "unix:/run/leasehold.sock")
    assert found.tls.client_ca == Path("/etc/leasehold/clients.pem")
    assert found.keys == Path("/etc/leasehold/keys.toml")
    assert found.limits == LimitSettings()
    assert found.audit_file == Path("/var/log/leasehold/audit.jsonl")
    assert found.authenticates
    assert found.warnings() == []


def test_flags_win_over_environment_over_file(config):
    path = config('engine = "memory://"\nworkers = 1\ncall_timeout = 1\nlog = "text"\n')
    environ = {"LEASEHOLD_SERVE_CALL_TIMEOUT": "2s", "LEASEHOLD_SERVE_LOG": "json", "OTHER": "x"}
    found = read({"call_timeout": 3, "workers": None, "listen": ()}, environ, path)
    assert (found.engine, found.call_timeout, found.log) == ("memory://", 3.0, "json")


def test_config_file_is_named_by_a_variable(config):
    path = config("workers = 3\n")
    assert read({}, {"LEASEHOLD_SERVE_CONFIG": str(path)}, None).workers == 3


@pytest.mark.parametrize(
    ("environ", "engine"),
    [
        ({"LEASEHOLD_URL": "memory://"}, "memory://"),
        ({"LEASEHOLD_URL": "memory://", "LEASEHOLD_SERVE_ENGINE": "redis://h"}, "redis://h"),
        ({}, "etcd://h"),
    ],
)
def test_engine_comes_from_the_nearest_source(config, environ, engine):
    path = config('engine = "etcd://h"\n')
    assert read({}, environ, path).engine == engine
    assert read({"engine": "mysql://h/d"}, environ, path).engine == "mysql://h/d"


VALUES = {
    "engine": "redis://h",
    "listen": "127.0.0.1:1,unix:/x",
    "log": "text",
    "no_auth": "true",
    "admin": "true",
    "demo": "true",
    "audit.required": "yes",
    "otel": "true",
    "trace_url": "https://tempo/trace/{trace}",
    "limits.wait": "30s",
    "call_timeout": "2.5",
    "picture_max_age": "2s",
    "peers": "http://locks-2:7420 https://locks-3?api_key_file=/run/key",
}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_is_read_from_its_three_sources(config, setting):
    text = VALUES.get(setting.name, "7" if setting.metavar == "N" else "/some/file")
    companions = {"tls_cert": "/some/cert", "audit_file": "/some/audit"}
    flags = {} if setting.name == "no_auth" else companions
    by_flag = read({**flags, setting.key: text}, {}, None)
    by_variable = read(flags if setting.key not in flags else {}, {setting.variable: text}, None)
    section, _, last = setting.name.rpartition(".")
    line = f"{last} = {text}" if setting.metavar in ("N", "") and text != "yes" else f'{last} = "{text}"'
    by_file = read(
        {key: value for key, value in flags.items() if key != setting.key},
        {},
        config(f"[{section}]\n{line}\n" if section else line + "\n"),
    )
    if setting.key in companions:
        by_flag = read({setting.key: text}, {}, None)
        by_file = read({}, {}, config(f"[{section}]\n{line}\n"))
    assert by_flag == by_variable == by_file
    assert by_flag != read({key: value for key, value in flags.items() if key != setting.key}, {}, None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("worker = 2\n", r"unknown word 'worker' \(did you mean workers\?\); known: engine, listen, workers"),
        ("[limits]\nwaiter = 2\n", r"unknown word 'limits.waiter' \(did you mean limits.waiters\?\)"),
        ("[limit]\nwaiters = 2\n", "unknown word 'limit'"),
        ("limits = 3\n", r"limits is a table: write \[limits\]"),
        ("workers = 0\n", "workers must be a whole number from 1 to 256, not 0"),
        ("workers = 257\n", "workers must be a whole number from 1 to 256, not 257"),
        ('workers = "x"\n', "workers must be a whole number"),
        ("workers = true\n", "workers must be a whole number"),
        ("workers = 1.5\n", "workers must be a whole number"),
        ("call_timeout = 0\n", "call_timeout must be seconds, more than 0 and at most 300"),
        ("call_timeout = nan\n", "call_timeout must be seconds"),
        ("call_timeout = inf\n", "call_timeout must be seconds"),
        ("call_timeout = -1\n", "call_timeout must be seconds"),
        ('call_timeout = "soon"\n', "call_timeout must be seconds"),
        ("call_timeout = [1]\n", "call_timeout must be seconds"),
        ("[limits]\nwait = 3601\n", "limits.wait must be seconds, more than 0 and at most 3600"),
        ("[limits]\ncalls = 0\n", "limits.calls must be a whole number from 1"),
        ("[limits]\nwaiters = -1\n", "limits.waiters must be a whole number from 0"),
        ("[limits]\nconnections = 99999999\n", "limits.connections must be a whole number"),
        ("listen = []\n", "listen must be a list of addresses"),
        ("listen = [7420]\n", "listen must be a list of addresses"),
        ('listen = ["7420"]\n', "HOST:PORT"),
        ('listen = ["127.0.0.1:65536"]\n', "from 0 to 65535"),
        ('listen = ["127.0.0.1:-1"]\n', "HOST:PORT"),
        ('listen = [":7420"]\n', "HOST:PORT"),
        ('listen = ["::1:7420"]\n', "HOST:PORT"),
        ('listen = ["http://127.0.0.1:7420"]\n', "HOST:PORT"),
        ('listen = ["unix:x"]\n', "an absolute path after unix:"),
        ('listen = ["127.0.0.1:1", "127.0.0.1:1"]\n', "different addresses"),
        ('log = "xml"\n', "log must be json or text, not 'xml'"),
        ("no_auth = 1\n", "no_auth must be true or false, not 1"),
        ("[auth]\nkeys = 1\n", "auth.keys must be the path of a file"),
        ('[auth]\nkeys = ""\n', "auth.keys must be the path of a file"),
        ('[tls]\nkey = "/k"\n', "tls.cert is missing"),
        ("[audit]\nrequired = true\n", "audit.required needs audit.file"),
        ('engine = ""\n', "engine must be an engine's URL"),
        ("engine = 1\n", "engine must be an engine's URL"),
        ("workers = \n", "is not TOML"),
        ("workers = " + "[" * 5000 + "\n", "is not TOML"),
        ("workers = " + "1" * 5000 + "\n", "is not TOML"),
    ],
)
def test_bad_value_is_refused_with_what_is_known(config, text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read({}, {}, config(text))


@pytest.mark.parametrize("variable", ["LEASEHOLD_SERVE_WORKER", "LEASEHOLD_SERVE_", "LEASEHOLD_SERVE_PORT"])
def test_unknown_variable_is_refused_with_the_known_ones(variable):
    with pytest.raises(ConfigError, match=f"unknown variable {variable}.*known: LEASEHOLD_SERVE_ENGINE"):
        read({}, {variable: "1"}, None)


def test_variables_of_a_kubernetes_service_are_no_settings():
    read({}, {"LEASEHOLD_SERVICE_HOST": "10.0.0.1", "LEASEHOLD_PORT": "tcp://10.0.0.1:7420"}, None)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"configuration file .*none\.toml cannot be read: No such file"):
        read({}, {}, tmp_path / "none.toml")


def test_file_that_every_user_can_write_is_refused(config):
    path = config("workers = 2\n")
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="can be written by every user"):
        read({}, {}, path)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.1.2.3:1", "example.com:1", "localhost.example.com:1"])
def test_public_address_without_authentication_is_refused(address):
    with pytest.raises(ConfigError, match=r"can be reached by other machines.*--keys FILE.*--no-auth"):
        read({"listen": ("127.0.0.1:1", address)}, {}, None)
    assert read({"listen": (address,), "no_auth": True}, {}, None).no_auth
    assert read({"listen": (address,), "keys": "/k"}, {}, None).authenticates
    assert read({"listen": (address,), "tls_cert": "/c", "tls_client_ca": "/a"}, {}, None).authenticates
    with pytest.raises(ConfigError, match="can be reached by other machines"):
        read({"listen": (address,), "tls_cert": "/c"}, {}, None)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/run/x"])
def test_local_address_needs_no_authentication(address):
    assert read({"listen": (address,)}, {}, None).listen == (address,)


def test_demo_never_uses_an_engine_that_was_set_for_other_work(config):
    file = config('engine = "redis://production"\n')
    environ = {"LEASEHOLD_URL": "redis://production", "LEASEHOLD_SERVE_ENGINE": "redis://production"}
    assert read({"demo": True}, environ, file).engine == "memory://"
    assert read({"demo": True, "engine": "sqlite:///x"}, environ, file).engine == "sqlite:///x"


def test_demo_beside_workers_is_refused():
    with pytest.raises(ConfigError, match="demo cannot be combined with workers"):
        read({"demo": True, "engine": "sqlite:///x", "workers": 2}, {}, None)


def test_no_auth_beside_keys_is_refused():
    with pytest.raises(ConfigError, match="no_auth cannot be combined"):
        read({"no_auth": True, "keys": "/k"}, {}, None)


def test_keys_on_a_public_address_without_tls_are_worth_a_warning():
    (warning,) = read({"listen": ("0.0.0.0:1",), "keys": "/k"}, {}, None).warnings()
    assert "unencrypted" in warning


def test_memory_engine_with_several_workers_is_refused():
    with pytest.raises(ConfigError, match="each worker would have locks of its own"):
        read({"engine": "memory://", "workers": 2}, {}, None)


def test_engine_url_is_in_no_repr_and_no_error(config):
    secret = "redis://:hunter2@h"
    assert "hunter2" not in repr(read({"engine": secret}, {}, None))
    for source in ({"LEASEHOLD_SERVE_ENGINE": "hunter2"}, {"LEASEHOLD_URL": "redis://:hunter2@@h"}):
        with pytest.raises(ConfigError) as error:
            read({}, source, None)
        assert "hunter2" not in str(error.value)


def test_key_of_the_certificate_defaults_to_its_file():
    assert read({"tls_cert": "/c"}, {}, None).tls.key == Path("/c")


def test_unknown_flag_is_a_bug_that_is_named():
    with pytest.raises(ConfigError, match="unknown flag 'x'"):
        read({"x": 1}, {}, None)


def test_settings_have_different_flags_and_variables():
    assert (
        len({setting.flag for setting in SETTINGS}) == len({setting.variable for setting in SETTINGS}) == len(SETTINGS)
    )
    assert all(setting.text.endswith(".") for setting in settings.SETTINGS)
