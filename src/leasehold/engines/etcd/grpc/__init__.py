"""The gRPC client of the etcd engine: our own HTTP/2 (RFC 9113) and HPACK (RFC 7541), on plain sockets.

connect.py      TCP and TLS (RFC 9113, sections 3.2, 3.3 and 9.2)
connection.py   one HTTP/2 connection: streams, flow control, GOAWAY (RFC 9113, sections 3.4, 5, 6 and 8.1)
frames.py       frames, gRPC messages, and one call (RFC 9113, sections 4.1 and 6)
hpack.py        header compression (RFC 7541)

Why not a library: grpcio has threads of its own and does not survive a fork. The `h2` package was tried: acquiring and
releasing a lock took 1.64 to 1.73 times as long as two bare Puts instead of 1.17, with twice the CPU time.
"""
