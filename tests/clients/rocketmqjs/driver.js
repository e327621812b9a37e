// The official Node client of RocketMQ as a process: understands the lines that ../rocketmq_driver.py understands.
'use strict';

const readline = require('node:readline');
const { setTimeout: sleep } = require('node:timers/promises');
const rocketmq = require('rocketmq-client-nodejs');
const pb = require('rocketmq-client-nodejs/proto/apache/rocketmq/v2/definition_pb');
const service = require('rocketmq-client-nodejs/proto/apache/rocketmq/v2/service_pb');
const { FilterType, TransactionResolution } = pb;

const [endpoints, accessKey, accessSecret] = process.argv.slice(2);
const silent = { debug() {}, info() {}, warn() {}, error() {} };
const options = {
  endpoints,
  namespace: '',
  logger: silent,
  sessionCredentials: accessKey ? { accessKey, accessSecret } : undefined,
};

const received = new Map();
const transactions = [];
const checked = [];
let producer;
let consumer;
let begun = [];
let done = [];

function told(message) {
  return {
    topic: message.topic,
    body: message.body.toString(),
    id: message.messageId,
    tag: message.tag ?? '',
    keys: [...message.keys].sort(),
    properties: Object.fromEntries(message.properties),
    group: message.messageGroup ?? '',
    attempt: message.deliveryAttempt,
    born_ms: message.bornTimestamp?.getTime() ?? 0,
    born_host: message.bornHost,
    lite: message.liteTopic ?? '',
    corrupted: message.corrupted ?? false,
  };
}

function outgoing(wish) {
  return {
    topic: wish.topic,
    body: Buffer.from(wish.body),
    tag: wish.tag,
    keys: wish.keys,
    properties: wish.properties && new Map(Object.entries(wish.properties)),
    messageGroup: wish.group,
    deliveryTimestamp: wish.at_s && new Date(wish.at_s * 1000),
    liteTopic: wish.lite,
    priority: wish.priority,
  };
}

function listener(failing, slowS) {
  begun = [];
  done = [];
  return {
    async consume(message) {
      const found = told(message);
      begun.push(found);
      await sleep(slowS * 1000);
      const left = failing[found.body] ?? 0;
      failing[found.body] = left - 1;
      if (left > 0) return rocketmq.ConsumeResult.FAILURE;
      done.push(found);
      return rocketmq.ConsumeResult.SUCCESS;
    },
  };
}

function subscriptions(topics, sql = false) {
  const type = sql ? FilterType.SQL : FilterType.TAG;
  return new Map(Object.entries(topics).map(([topic, text]) => [topic, new rocketmq.FilterExpression(text, type)]));
}

const wishes = {
  async producer({ topics, undecided = [] }) {
    const checker = {
      async check(message) {
        const body = message.body.toString();
        checked.push(body);
        return undecided.includes(body) ? null : TransactionResolution.COMMIT;
      },
    };
    producer = new rocketmq.Producer({ ...options, topics, checker });
    await producer.startup();
    return {};
  },

  async send(wish) {
    const receipt = await producer.send(outgoing(wish));
    return { id: receipt.messageId, recall: receipt.recallHandle ?? '' };
  },

  async recall({ topic, handle }) {
    return { id: (await producer.recallMessage(topic, handle)).messageId };
  },

  async begin(wish) {
    const transaction = producer.beginTransaction();
    const receipt = await producer.send(outgoing(wish), transaction);
    transactions.push(transaction);
    return { id: receipt.messageId };
  },

  async end({ commit }) {
    const transaction = transactions.pop();
    await (commit ? transaction.commit() : transaction.rollback());
    return {};
  },

  async checked() {
    return { bodies: checked };
  },

  async simple({ group, topics, wait_s: waitS = 5, sql = false }) {
    consumer = new rocketmq.SimpleConsumer({
      ...options, consumerGroup: group, subscriptions: subscriptions(topics, sql), awaitDuration: waitS * 1000,
    });
    await consumer.startup();
    return {};
  },

  async receive({ count = 32, invisible_s: invisibleS = 30 }) {
    const messages = await consumer.receive(count, invisibleS * 1000);
    for (const message of messages) received.set(message.messageId, message);
    return { messages: messages.map(told) };
  },

  async ack({ id }) {
    await consumer.ack(received.get(id));
    return {};
  },

  async change({ id, invisible_s: invisibleS }) {
    await consumer.changeInvisibleDuration(received.get(id), invisibleS * 1000);
    return {};
  },

  async push({ group, topics, failing = {}, slow_s: slowS = 0 }) {
    consumer = new rocketmq.PushConsumer({
      ...options, consumerGroup: group, subscriptions: subscriptions(topics), messageListener: listener(failing, slowS),
    });
    await consumer.startup();
    return {};
  },

  async pushed() {
    return { begun, done };
  },

  async lite_push({ group, parent, lite }) {
    consumer = new rocketmq.LitePushConsumerImpl({
      ...options, consumerGroup: group, bindTopic: parent, messageListener: listener({}, 0),
    });
    await consumer.startup();
    for (const name of lite) await consumer.subscribeLite(name);
    return {};
  },

  // The client has no pull consumer, but the calls of one.
  async pull({ group, topic, count = 32 }) {
    const named = (name) => new pb.Resource().setName(name);
    const queue = () => new pb.MessageQueue().setTopic(named(topic));
    const calls = consumer.rpcClientManager;
    const call = (method, request) => calls[method](consumer.endpoints, request.setMessageQueue(queue()), 5000);
    const code = (response) => response.getStatus().getCode();

    const before = await call('getOffset', new service.GetOffsetRequest().setGroup(named(group)));
    const end = await call('queryOffset', new service.QueryOffsetRequest().setQueryOffsetPolicy(pb.QueryOffsetPolicy.END));
    const expression = new pb.FilterExpression().setType(FilterType.TAG).setExpression('*');
    const responses = await call('pullMessage', new service.PullMessageRequest().setGroup(named(group))
      .setOffset(before.getOffset()).setBatchSize(count).setFilterExpression(expression));
    const messages = responses.filter((each) => each.hasMessage()).map((each) => each.getMessage());
    const next = responses.find((each) => each.hasNextOffset()).getNextOffset();
    const noted = await call('updateOffset', new service.UpdateOffsetRequest().setGroup(named(group)).setOffset(next));
    return {
      codes: [code(before), code(end), code(responses[0]), code(noted)],
      offset: before.getOffset(), end: end.getOffset(), next,
      bodies: messages.map((each) => Buffer.from(each.getBody_asU8()).toString()),
    };
  },

  async stop() {
    await consumer?.shutdown();
    await producer?.shutdown();
    consumer = producer = undefined;
    return {};
  },
};

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const wish = JSON.parse(line);
    let answer;
    try {
      answer = await wishes[wish.do](wish);
    } catch (error) {
      answer = { error: `${error.name}: ${error.message}`, code: error.code ?? 0 };
    }
    process.stdout.write(`${JSON.stringify(answer)}\n`);
  }
  process.exit(0);
}

main();
