"""Send and consume with the client for threads.

python examples/native_sync.py 127.0.0.1:8081
"""

from __future__ import annotations

import sys

from penstock import OutgoingMessage, SyncClient


def main(address: str) -> None:
    with SyncClient(address) as client:
        client.send_batch([OutgoingMessage(topic="plant/1/pressure", body=b"%d" % n) for n in range(100)])
        later = client.send("plant/1/pressure", b"never seen", delay=60.0)
        client.recall(later.recall_handle)
        consumed = 0
        for message in client.consume("plant/+/pressure", group="example-sync"):
            message.ack()
            consumed += 1
            if consumed == 100:
                break
        print(f"consumed {consumed}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081")
