"""What runs the SQL: Spark, or DuckDB. Both run the same text over the same Parquet files, and write Parquet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.spark.errors import ReadOptionInvalid
from penstock.spark.parquet.schema import ParquetTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

Row = dict[str, Any]

DUCKDB_MEMORY = "1GB"
"""Memory that DuckDB takes before it puts what exceeds it on disk."""


class Engine(Protocol):
    """Runs SQL over Parquet files."""

    @property
    def name(self) -> str:
        """What the report calls it."""

    def register(self, table: ParquetTable, name: str, files: Sequence[Path]) -> None:
        """Give files of a table a name that SQL can use. There is at least one."""

    def view(self, name: str, sql: str) -> None:
        """Give a query a name."""

    def materialise(self, name: str, sql: str, directory: Path | None) -> None:
        """Run a query, and give its rows a name. They are written to a new directory as Parquet, or kept for the run."""

    def rows(self, sql: str) -> list[Row]:
        """Return the rows of a query that has few."""

    def close(self) -> None:
        """Free what the engine holds. Files stay."""


class DuckEngine:
    """DuckDB, in this process.

    Parameters:
        scratch: a directory for what does not fit into memory.
        threads: how many it uses; as many as there are processors if it is None.
    """

    name = "duckdb"

    def __init__(self, scratch: Path, *, threads: int | None = None) -> None:
        import duckdb

        settings: dict[str, Any] = {"memory_limit": DUCKDB_MEMORY, "temp_directory": str(scratch)}
        settings["autoinstall_known_extensions"] = False  # nothing is to be loaded from the network
        if threads is not None:
            settings["threads"] = threads
        self._connection = duckdb.connect(config=settings)
        self._connection.execute("SET preserve_insertion_order = false")

    def register(self, table: ParquetTable, name: str, files: Sequence[Path]) -> None:
        self._register(name, files)

    def _register(self, name: str, files: Sequence[Path]) -> None:
        listed = ", ".join(_literal(re.sub(r"([*?\[\]])", r"[\1]", str(path))) for path in files)  # they may be patterns
        self._connection.execute(
            f"CREATE OR REPLACE VIEW {name} AS SELECT * FROM read_parquet([{listed}], hive_partitioning = false)"
        )

    def view(self, name: str, sql: str) -> None:
        self._connection.execute(f"CREATE TEMP VIEW {name} AS {sql}")

    def materialise(self, name: str, sql: str, directory: Path | None) -> None:
        if directory is None:
            self._connection.execute(f"CREATE TEMP TABLE {name} AS {sql}")
            return
        directory.mkdir()
        target = directory / "part-0.parquet"
        self._connection.execute(f"COPY ({sql}) TO {_literal(str(target))} (FORMAT parquet, COMPRESSION zstd)")
        self._register(name, [target])

    def rows(self, sql: str) -> list[Row]:
        found = self._connection.execute(sql)
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def close(self) -> None:
        self._connection.close()


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


SIZE_FACTOR = "spark.sql.sources.fileCompressionFactor"
TABLES_FACTOR = "100"
"""How many times larger than its files Spark takes a table to be. A row of the tables may take half a byte, and Spark would
send ten million of them to every task, as it does with small tables."""


class SparkEngine:
    """A Spark session, also of Spark Connect. It needs nothing of Penstock on the executors, but they must see the files.

    It has temporary views in the session until `close`, with the names of the tables and steps.
    """

    name = "spark"

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._taken = {table.name for table in spark.catalog.listTables() if table.isTemporary}
        self._factor_before = spark.conf.get(SIZE_FACTOR) or "1.0"
        spark.conf.set(SIZE_FACTOR, TABLES_FACTOR)
        self._names: list[str] = []
        self._kept: list[DataFrame] = []

    def register(self, table: ParquetTable, name: str, files: Sequence[Path]) -> None:
        schema = ", ".join(f"{column.name} {column.type}" for column in table.columns)
        self._read(name, [escaped(path) for path in files], schema)

    def _read(self, name: str, paths: list[str], schema: StructType | str) -> None:
        # With a schema, Spark need not look into a file first. No columns are made from the names of folders.
        reader = self._spark.read.schema(schema).option("recursiveFileLookup", "true")
        self._name(name, reader.parquet(*paths))

    def _name(self, name: str, rows: DataFrame) -> None:
        if name in self._taken:
            raise ReadOptionInvalid(f"The session has a view named {name} already. Drop it, or use `spark.newSession()`.")
        rows.createOrReplaceTempView(name)
        self._names.append(name)

    def view(self, name: str, sql: str) -> None:
        self._name(name, self._spark.sql(sql))

    def materialise(self, name: str, sql: str, directory: Path | None) -> None:
        rows = self._spark.sql(sql)
        if directory is None:
            self._kept.append(rows.cache())
            rows.count()  # with the size known, Spark sends a small table to each task rather than all others to it
            self._name(name, rows)
            return
        rows.write.parquet(f"file://{directory}")
        self._read(name, [escaped(directory)], rows.schema)

    def rows(self, sql: str) -> list[Row]:
        found: list[Row] = self._spark.sql(sql).toArrow().to_pylist()
        return found

    def close(self) -> None:
        self._spark.conf.set(SIZE_FACTOR, self._factor_before)
        for name in self._names:
            self._spark.catalog.dropTempView(name)
        for rows in self._kept:
            rows.unpersist()


def escaped(path: Path) -> str:
    """Return a local file as Hadoop's paths name it, which may be patterns."""
    return "file://" + re.sub(r"([*?\[\]{}\\])", r"\\\1", str(path))
