"""What brokers and routers have in common: the decorators `subscriber` and `publisher`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from faststream._internal.broker.registrator import Registrator
from faststream._internal.broker.router import BrokerRouter
from faststream._internal.constants import EMPTY
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream.middlewares import AckPolicy

from penstock.contrib.faststream.command import SendOptions
from penstock.contrib.faststream.publisher import PenstockPublisher
from penstock.contrib.faststream.settings import (
    ConsumingPlan,
    PenstockConfig,
    PenstockPublisherConfig,
    PenstockPublisherSpecificationConfig,
    PenstockSubscriberConfig,
    PenstockSubscriberSpecificationConfig,
    address_of,
)
from penstock.contrib.faststream.specification import PenstockPublisherSpecification, PenstockSubscriberSpecification
from penstock.contrib.faststream.subscriber import BatchSubscriber, PenstockSubscriber, SingleSubscriber
from penstock.pop.client.durations import Duration, seconds
from penstock.pop.client.message import Message
from penstock.pop.client.requests import Start
from penstock.pop.client.results import GroupSettings

if TYPE_CHECKING:
    from fast_depends.dependencies import Dependant
    from faststream._internal.parser import CodecProto
    from faststream._internal.types import BrokerMiddleware, CustomCallable


class PenstockRegistrator(Registrator[Message, PenstockConfig]):
    """Registers subscribers and publishers."""

    def subscriber(  # type: ignore[override]
        self,
        topic: str,
        *,
        group: str,
        batch: int = 0,
        max_workers: int = 1,
        timeout: Duration = 60.0,
        invisible: Duration = 30.0,
        fifo: bool = False,
        start: Start = "earliest",
        settings: GroupSettings | None = None,
        ack_policy: AckPolicy = EMPTY,
        no_reply: bool = False,
        dependencies: Sequence[Dependant] = (),
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
        codec: CodecProto | None = None,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        include_in_schema: bool = True,
    ) -> PenstockSubscriber[Any]:
        """Return a decorator that makes a function the handler of a group.

        Args:
            topic: MQTT topic filter, or `$dlq/GROUP` for the dead letters of another group. `{name}` stands for one level, and
                the handler gets it as `name: str = Path()`.
            group: Name of the group. All its subscribers, in any process, share the messages.
            batch: The handler takes lists of up to so many bodies, 1 to 1,024: those that wait, without a delay. 0: it takes
                one body.
            max_workers: Maximum number of calls at a time, 1 to 10,000.
            timeout: Time after which a call is cancelled and its message goes back as a failed attempt, in seconds or as a
                timedelta. A plain function runs in a thread and can't be cancelled: its message goes back all the same.
            invisible: Time in which a message comes back if the process dies, in seconds or as a timedelta, 0.1 to 43,200
                seconds. Running calls are extended.
            fifo: The group is in FIFO order. The messages of one message group are handled one after the other, in their order,
                and those after a failed one wait for it.
            start: Where the group starts if this subscriber creates it, as for `Client.consume`.
            settings: Settings of the group, from `group_settings`. The subscriber creates the group with them, or changes it.
            ack_policy: What settles a message. By default NACK_ON_ERROR: a handler that returns acknowledges it, and one that
                raises returns it as a failed attempt, for which the back-off of the group applies.
            no_reply: Do not publish what the handler returns to the response topic of the message.
            dependencies: As in FastStream's own brokers.
            parser: As in FastStream's own brokers.
            decoder: As in FastStream's own brokers.
            codec: As in FastStream's own brokers.
            persistent: As in FastStream's own brokers.
            title: For AsyncAPI.
            description: For AsyncAPI.
            include_in_schema: For AsyncAPI.

        Raises:
            TypeError: A duration is none.
            ValueError: A number is out of its bounds. The broker raises most of these when it starts.
            SetupError: A parameter of the topic is only part of a level, or the handler takes batches.
        """
        if fifo:
            settings = GroupSettings(fifo=True) if settings is None else replace(settings, fifo=True)
        config = cast("PenstockConfig", self.config)
        address = address_of(topic, batch)
        calls: CallsCollection[Any] = CallsCollection()
        specification = PenstockSubscriberSpecification(
            config,
            PenstockSubscriberSpecificationConfig(
                address=address, title_=title, description_=description, include_in_schema=include_in_schema
            ),
            calls,
        )
        consuming = ConsumingPlan(
            group=group,
            batch=batch,
            max_workers=max_workers,
            timeout_s=seconds(timeout, "timeout"),
            invisible_s=seconds(invisible, "invisible"),
            fifo=fifo,
            start=start,
            settings=settings,
        )
        subscriber_config = PenstockSubscriberConfig(
            _outer_config=config, _ack_policy=ack_policy, no_reply=no_reply, address=address, consuming=consuming
        )
        kind: type[PenstockSubscriber[Any]] = BatchSubscriber if batch else SingleSubscriber
        subscriber = kind(subscriber_config, specification, calls)
        super().subscriber(subscriber, persistent=persistent)
        return subscriber.add_call(
            parser_=parser or self._parser,
            decoder_=decoder or self._decoder,
            codec_=codec,
            dependencies_=dependencies,
        )

    def publisher(  # type: ignore[override]
        self,
        topic: str,
        *,
        headers: dict[str, str] | None = None,
        reply_to: str = "",
        tag: str = "",
        message_group: str = "",
        deliver_at: datetime | None = None,
        delay: Duration = 0.0,
        expire_after: Duration = 0.0,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        schema: Any | None = None,
        include_in_schema: bool = True,
    ) -> PenstockPublisher:
        """Return a publisher of a topic. As a decorator it publishes what the handler returns, before the message is settled.

        Args:
            topic: MQTT topic, without wildcards.
            headers: Default, as for `PenstockBroker.publish`.
            reply_to: Default, as for `PenstockBroker.publish`.
            tag: Default, as for `PenstockBroker.publish`.
            message_group: Default, as for `PenstockBroker.publish`.
            deliver_at: Default, as for `PenstockBroker.publish`.
            delay: Default, as for `PenstockBroker.publish`.
            expire_after: Default, as for `PenstockBroker.publish`.
            persistent: As in FastStream's own brokers.
            title: For AsyncAPI.
            description: For AsyncAPI.
            schema: For AsyncAPI.
            include_in_schema: For AsyncAPI.
        """
        config = cast("PenstockConfig", self.config)
        specification = PenstockPublisherSpecification(
            config,
            PenstockPublisherSpecificationConfig(
                topic=topic, title_=title, description_=description, schema_=schema, include_in_schema=include_in_schema
            ),
        )
        options = SendOptions(
            tag=tag, message_group=message_group, deliver_at=deliver_at, delay=delay, expire_after=expire_after
        )
        publisher_config = PenstockPublisherConfig(
            _outer_config=config, topic=topic, headers=headers or {}, reply_to=reply_to, options=options
        )
        publisher = PenstockPublisher(publisher_config, specification)
        super().publisher(publisher, persistent=persistent)
        return publisher


class PenstockRouter(PenstockRegistrator, BrokerRouter[Message, PenstockConfig]):
    """A set of subscribers and publishers that a broker includes.

    Parameters:
        prefix: Stands before all their topics.
        ack_policy: Default of its subscribers.
        dependencies: As in FastStream's own routers.
        middlewares: As in FastStream's own routers.
        routers: As in FastStream's own routers.
        parser: As in FastStream's own routers.
        decoder: As in FastStream's own routers.
        include_in_schema: As in FastStream's own routers.
    """

    def __init__(
        self,
        prefix: str = "",
        *,
        ack_policy: AckPolicy = EMPTY,
        dependencies: Sequence[Dependant] = (),
        middlewares: Sequence[BrokerMiddleware[Any, Any]] = (),
        routers: Iterable[PenstockRegistrator] = (),
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
        include_in_schema: bool | None = None,
    ) -> None:
        super().__init__(
            handlers=(),
            config=PenstockConfig(
                prefix=prefix,
                ack_policy=ack_policy,
                broker_dependencies=dependencies,
                broker_middlewares=middlewares,
                broker_parser=parser,
                broker_decoder=decoder,
                include_in_schema=include_in_schema,
            ),
            routers=routers,
        )
