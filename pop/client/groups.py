"""Administration of groups: `Client.groups` and `SyncClient.groups`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.pop.client import answers, requests
from penstock.pop.client.calls import AsyncCalls, SyncCalls
from penstock.pop.client.requests import End, Start
from penstock.pop.client.results import GroupDescription, GroupSettings

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import GroupServiceAsyncStub, GroupServiceStub


class GroupCalls:
    """Creates, changes, describes, resets and deletes groups.

    A group of one name may have several filters, each with a cursor of its own. Where a method takes `topic_filter`, an empty
    string means all filters of the group. All methods raise NodeUnavailable, NotAuthenticated and NotPermitted.
    """

    def __init__(self, call: AsyncCalls, stub: GroupServiceAsyncStub) -> None:
        self._call = call
        self._stub = stub

    async def create(
        self, group: str, topic_filter: str, *, start: Start = "earliest", settings: GroupSettings | None = None
    ) -> GroupDescription:
        """Create a group; return its description. If it exists with the same settings, return it as it is.

        Args:
            group: Name of the group: 1 to 255 bytes of UTF-8, printable, without `/`, `#`, `+` and `$`, no space at its ends.
            topic_filter: MQTT topic filter (MQTT 5.0, 4.7), or `$dlq/GROUP` for the dead letters of another group.
            start: Where the group starts.
            settings: Settings from `group_settings`.

        Raises:
            GroupExists: The group exists with other settings.
            RequestInvalid: The name, the filter or a setting breaks a rule.
            Overloaded: `pop.groups_max` or another bound of the node is reached, or the disk is full.
        """
        answer = await self._call(self._stub.CreateGroup, requests.create_group(group, topic_filter, start, settings))
        return GroupDescription(answer.groups[0])

    async def update(self, group: str, settings: GroupSettings, *, topic_filter: str = "") -> list[GroupDescription]:
        """Change the settings that are given (by `group_settings`); return the new descriptions.

        Raises:
            GroupUnknown: There is no such group.
            GroupBusy: The change needs a group without messages in flight. The message says what to wait for.
            RequestInvalid: A setting is out of bounds.
        """
        answer = await self._call(self._stub.UpdateGroup, requests.update_group(group, topic_filter, settings))
        return answers.groups(answer)

    async def describe(self, group: str = "", topic_filter: str = "") -> list[GroupDescription]:
        """Return settings and backlog of a group, or of all groups if no name is given.

        Raises:
            GroupUnknown: There is no such group.
        """
        answer = await self._call(self._stub.DescribeGroups, requests.name_group(group, topic_filter))
        return answers.groups(answer)

    async def delete(self, group: str, *, topic_filter: str = "") -> None:
        """Delete a group. Its handles become void. Its dead letters are deleted unless another group consumes them.

        Raises:
            GroupUnknown: There is no such group.
        """
        await self._call(self._stub.DeleteGroup, requests.name_group(group, topic_filter))

    async def reset(
        self,
        group: str,
        *,
        topic_filter: str = "",
        end: End | None = None,
        time_ms: int | None = None,
        message_id: str | None = None,
    ) -> list[GroupDescription]:
        """Move a group to another place in its queue; return the new descriptions. Its handles become void.

        Args:
            group: Name of the group.
            topic_filter: One of its filters. Empty: all of them.
            end: Continue at this end of the queue.
            time_ms: Continue with the messages stored at this time or later, in ms since 1970.
            message_id: Continue with this message.

        Raises:
            GroupUnknown: There is no such group.
            GroupBusy: The group's queue is still being filled from the log.
            RequestInvalid: The place is not valid.
            ValueError: Not exactly one place is given.
        """
        request = requests.reset_group(group, topic_filter, end, time_ms, message_id)
        return answers.groups(await self._call(self._stub.ResetGroup, request))


class SyncGroupCalls:
    """The methods of `GroupCalls`, for threads. Parameters, results and errors are the same."""

    def __init__(self, call: SyncCalls, stub: GroupServiceStub) -> None:
        self._call = call
        self._stub = stub

    def create(
        self, group: str, topic_filter: str, *, start: Start = "earliest", settings: GroupSettings | None = None
    ) -> GroupDescription:
        """Create a group, as `GroupCalls.create`."""
        answer = self._call(self._stub.CreateGroup, requests.create_group(group, topic_filter, start, settings))
        return GroupDescription(answer.groups[0])

    def update(self, group: str, settings: GroupSettings, *, topic_filter: str = "") -> list[GroupDescription]:
        """Change settings, as `GroupCalls.update`."""
        return answers.groups(self._call(self._stub.UpdateGroup, requests.update_group(group, topic_filter, settings)))

    def describe(self, group: str = "", topic_filter: str = "") -> list[GroupDescription]:
        """Return settings and backlog, as `GroupCalls.describe`."""
        return answers.groups(self._call(self._stub.DescribeGroups, requests.name_group(group, topic_filter)))

    def delete(self, group: str, *, topic_filter: str = "") -> None:
        """Delete a group, as `GroupCalls.delete`."""
        self._call(self._stub.DeleteGroup, requests.name_group(group, topic_filter))

    def reset(
        self,
        group: str,
        *,
        topic_filter: str = "",
        end: End | None = None,
        time_ms: int | None = None,
        message_id: str | None = None,
    ) -> list[GroupDescription]:
        """Move a group to another place in its queue, as `GroupCalls.reset`."""
        request = requests.reset_group(group, topic_filter, end, time_ms, message_id)
        return answers.groups(self._call(self._stub.ResetGroup, request))
