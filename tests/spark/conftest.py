"""One Spark session for all tests of Spark's part: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")
    from spark.errors import JavaMissing
    from spark.session import open_session

    try:
        session = open_session("local[2]", "millrace tests")
    except JavaMissing as error:
        pytest.skip(str(error))
    yield session
    session.stop()
