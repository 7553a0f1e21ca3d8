"""Connections to servers, in both modes: bytes out, replies in the order of the requests, a deadline on each call.

blocking.py            one connection, blocking
tls_socket.py          TLS on that connection
http_client.py         requests of HTTP, blocking, for commands and fences
host_names.py          their addresses, by a deadline
event_loop.py          one connection, asyncio
fanout_blocking.py     several servers at once, blocking
fanout_event_loop.py   several servers at once, asyncio
"""
