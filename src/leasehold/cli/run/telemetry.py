"""Metrics, traces and audit records of one run: `--metrics-file`, `--metrics-group`, `--otel` and `--audit`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from leasehold import telemetry
from leasehold.blocking import Lease
from leasehold.cli.console import Console
from leasehold.cli.option import Option, Options, file_path, usage_error
from leasehold.cli.options import audit_hook
from leasehold.errors import ConfigError
from leasehold.events import Hook

if TYPE_CHECKING:
    from leasehold.telemetry.event_queue import Background
    from leasehold.telemetry.text_file import TextFile

_WRITE_SECONDS: Final = 1.0  # at most this long the end of a run waits for its metrics to be written


telemetry_options = Options(
    (
        Option(
            "--metrics-file",
            click_type=file_path,
            envvar="LEASEHOLD_METRICS_FILE",
            show_envvar=True,
            metavar="FILE",
            help="Add metrics of this run to FILE, whose name ends in .prom, for the textfile collector of "
            "node_exporter.",
        ),
        Option(
            "--metrics-group",
            multiple=True,
            envvar="LEASEHOLD_METRICS_GROUP",
            show_envvar=True,
            metavar="[REGEX=]GROUP",
            help="Count NAME under GROUP in metrics, if REGEX matches all of NAME. Default: NAME without its ids. "
            "May be given several times; the first that matches counts.",
        ),
        Option(
            "--otel",
            is_flag=True,
            envvar="LEASEHOLD_OTEL",
            show_envvar=True,
            help="Export spans with OpenTelemetry, configured by its OTEL_* variables. They continue the trace of "
            "TRACEPARENT, and CMD gets a TRACEPARENT of its own.",
        ),
    )
)


class RunTelemetry:
    """The options, and what they switch on."""

    def __init__(
        self,
        console: Console,
        metrics_file: str | None,
        metrics_group: tuple[str, ...],
        otel: bool,
        audit_file: str | None,
        audit_key_file: str | None,
    ) -> None:
        """Refuse what cannot work now, rather than after an hour of work."""
        self._console, self._otel, self._audit_file, self._audit_key_file = console, otel, audit_file, audit_key_file
        self._text_file: TextFile | None = None
        if metrics_file is None and not metrics_group and not otel:
            return
        from leasehold.telemetry.groups import group_rule  # only here: most runs do without
        from leasehold.telemetry.text_file import TextFile

        try:
            self._group = group_rule(metrics_group)
            if metrics_file is not None:
                metrics = telemetry.Metrics(group=self._group)
                self._text_file = TextFile(metrics_file, metrics)
        except ConfigError as bad:
            raise usage_error(str(bad)) from None
        except OSError as error:
            raise usage_error(f"--metrics-file {metrics_file!r}: {error.strerror}") from None

    @contextmanager
    def start(self) -> Iterator[RunHooks]:
        """The hooks of one run. Call it after the child is forked: it starts threads. They end with it."""
        with ExitStack() as stack:
            tracing = None
            hooks: list[Hook] = []
            if audit := stack.enter_context(audit_hook(self._audit_file, self._audit_key_file)):
                hooks.append(audit)
            if self._otel:
                tracing = stack.enter_context(telemetry.otel.export_from_environment(os.environ, self._group))
                hooks.append(tracing)
            if self._text_file is not None:
                # The disk may be slow, or a network: no lock waits for it.
                background = telemetry.background(self._text_file)
                stack.callback(self._end_writes, background)
                hooks.append(background)
            yield RunHooks(telemetry.fan(*hooks) if hooks else None, tracing)

    def _end_writes(self, background: Background) -> None:
        if not background.stop(_WRITE_SECONDS):
            self._console.say("the --metrics-file was not written in time", error=True)

    def write_result(self, name: str, exit_code: int) -> None:
        if self._text_file is not None:
            try:
                self._text_file.write_result(self._console.namespace, name, exit_code)
            except (OSError, ConfigError) as error:  # keep the exit code of the run
                self._console.say(f"the --metrics-file could not be written: {error}", error=True)


class RunHooks(NamedTuple):
    hook: Hook | None
    tracing: telemetry.otel.Hook | None

    def environment(self, lease: Lease) -> dict[str, str | None]:
        """The variables that continue the trace in CMD. Without --otel, CMD inherits those of this process."""
        if self.tracing is None:
            return {}
        found = self.tracing.environment(lease.fingerprint)
        return {"TRACEPARENT": None, "TRACESTATE": None, **found} if found else {}
