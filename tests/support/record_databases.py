"""A database for tests of records in the caller's transaction: connections, and a table of effects."""

import contextlib
import sqlite3
from urllib.parse import urlsplit

from leasehold.records import stores


class Database:
    """Connections to one kind of database, and a table `paid` with a row per effect."""

    def __init__(self, kind: str, url: str, tmp_path) -> None:
        self.kind, self.url, self.path = kind, url, str(tmp_path / "shop.db")
        with contextlib.closing(self.connect()) as connection:
            for statement in stores.schema(kind).split(";\n"):
                if statement.strip():
                    connection.cursor().execute(statement)
            connection.cursor().execute("drop table if exists paid")
            connection.cursor().execute("create table paid (name varchar(200))")
            connection.commit()

    @property
    def mysql(self) -> dict:
        parts = urlsplit(self.url)
        connect_arguments = {
            "host": parts.hostname,
            "port": parts.port,
            "user": parts.username,
            "password": parts.password,
        }
        return {**connect_arguments, "database": parts.path.strip("/")}

    def connect(self):
        if self.kind == "sqlite":
            return sqlite3.connect(self.path, timeout=30, check_same_thread=False)
        if self.kind == "postgresql":
            import psycopg

            return psycopg.connect(self.url)
        import pymysql

        return pymysql.connect(**self.mysql)

    async def connect_async(self):
        if self.kind == "postgresql":
            import psycopg

            return await psycopg.AsyncConnection.connect(self.url)
        import aiomysql

        connect_arguments = self.mysql
        return await aiomysql.connect(db=connect_arguments.pop("database"), **connect_arguments)

    def insert(self) -> str:
        return "insert into paid (name) values (?)" if self.kind == "sqlite" else "insert into paid (name) values (%s)"

    def paid(self, name: str) -> int:
        with contextlib.closing(self.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute("select name from paid")
            return [row[0] for row in cursor.fetchall()].count(name)
