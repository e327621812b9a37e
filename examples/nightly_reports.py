"""A report per tenant and night, by a schedule of the node: nothing of the service has to run in between.

python examples/nightly_reports.py 127.0.0.1:8081

The schedules have the name of the tenant, its time zone, and a body that names the day. If the node is down at two in the
morning, `missed="once"` lets it ask for the report as soon as it is back. `run` asks for one at any time.
"""

from __future__ import annotations

import asyncio
import sys

from penstock import Client

TENANTS = {"acme": "Europe/Berlin", "globex": "America/New_York", "initech": "Asia/Tokyo"}


async def main(address: str) -> None:
    async with Client(address) as client:
        for tenant, zone in TENANTS.items():
            made = await client.schedules.create(
                f"report/{tenant}",
                f"reports/{tenant}",
                b'{"day": "{{occurrence:%Y-%m-%d}}", "number": {{number}}}',
                template=True,
                cron="0 2 * * *",
                zone=zone,
                missed="once",
                replace=True,
            )
            print(f"{tenant}: {len(made.upcoming_ms)} nights ahead in {made.schedule.zone}")

        await client.schedules.run("report/acme")  # not to wait until two in the morning
        async for message in client.consume("reports/#", group="example-reports"):
            print(f"report of {message.topic.removeprefix('reports/')}: {message.properties['schedule']}")
            await message.ack()
            break

        for tenant in TENANTS:
            await client.schedules.delete(f"report/{tenant}")
        print(f"schedules left: {len(await client.schedules.list(prefix='report/'))}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081"))
