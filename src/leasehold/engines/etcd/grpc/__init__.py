"""The gRPC client of the etcd engine: HTTP/2 written here, over the runtime's sockets.

connect.py      TCP and TLS
connection.py   one HTTP/2 connection: streams, flow control, GOAWAY (RFC 9113)
frames.py       frames and settings (RFC 9113, sections 4 and 6)
hpack.py        header compression (RFC 7541)

Why not a library: grpcio has threads of its own and does not survive a fork; the `h2` package was tried, and an acquire
and release took 1.64 to 1.73 times two bare Puts instead of 1.17, with twice the CPU.
"""
