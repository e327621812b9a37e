"""The admin API answers whatever its OpenAPI document allows, and much that it does not, as the document says."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from tests.depth import DEPTH
from tests.gateway.wire import Broker
from tests.node.adminapi import broker

__all__ = ["broker"]

EXAMPLES = 10 * DEPTH
"""Requests for each operation and phase."""

CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance"
"""What is checked. The document allows each operation any of its statuses: most of what is made up is not there."""


@pytest.mark.nightly
async def test_schemathesis_finds_nothing(broker: Broker) -> None:
    await broker.connect("a")
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"http://{broker.node.admin}/api/v1/openapi.json"),
        *("--header", "Authorization: Bearer admin", "--checks", CHECKS, "--max-examples", str(EXAMPLES)),
        *("--exclude-tag", "streams"),  # they have no end
        *("--seed", os.environ.get("PENSTOCK_TEST_SEED", "1"), "--workers", "1", "--no-color"),
    ]
    running = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=broker.config.data_dir.parent
    )
    output, _ = await running.communicate()
    print(output.decode())
    assert running.returncode == 0, output.decode()[-4_000:]
