"""The lock server: one engine over HTTP, for programs in any language.

service.py     the verbs over one engine, wake-ups, long-polls, drain; knows nothing of HTTP
routes.py      what it records about claims: which client to wake, which requests wait
grants.py      what it records about grants: which client to notify, how many count for each caller
app.py         the application: which path does what, who may call it, how an answer is sent
api.py         the HTTP API: one function for each path       schemas.py   its bodies and answers, typed
queries.py     routes that only read: locks, owners, history, incidents, statistics
picture.py     the last inspect of each namespace, kept for readers   deadlocks.py cycles and chains in it
history.py     past grants, waits and incidents, from events  stats.py     an hour of them, in buckets of ten seconds
fair_table.py  a bound that namespaces share
past.py        the records of the history, typed              incidents.py what each incident means; owners gone quiet
dashboard/     pages for people                               demo.py      example traffic, for `--demo`
peers.py       the history of all servers of an engine        merging.py   how it is merged
calls.py       what remote engines use: verbs in batches, a stream of wake-ups
messages.py    requests and responses, without ASGI           problems.py  every error as problem+json (RFC 9457)
settings.py    flags over environment over configuration file over defaults
keys.py        the file of API keys       auth.py    who calls, and what the caller may do
limits.py      how much is admitted at once, and what is refused first
tls.py         certificates               watched_files.py files that are read again when they change
protocol.py    uvicorn's HTTP protocol, with limits           listener.py  accepts connections
audit.py       who was granted, released, broke or was refused what
spans.py       the trace of each request, and its spans for OpenTelemetry
feed.py        what happens through this server, for callers that watch it
metrics.py     the metrics of the server itself               openapi.py   the OpenAPI document, made from the routes
workers.py     several processes of one host, and the wake-ups between them
run.py         runs the application on uvicorn: sockets, signals, drain
"""
