// One MQTT.js client that does what the lines on stdin say, and answers each with one line. The first argument names the version of
// MQTT: js-3 or js-5. tests/clients/mqtt_processes.py drives this, and says what the lines mean.
"use strict";

const mqtt = require("mqtt");
const readline = require("node:readline");

const WAIT_MS = 20_000;
const BODY_MAX = 1_000;
const isV5 = process.argv[2].endsWith("5");

let client = null;
let acked = 0;
const messages = [];
const takers = [];

const inTime = (promise, why) =>
  Promise.race([promise, new Promise((_, fail) => setTimeout(() => fail(new Error(why)), WAIT_MS).unref())]);
const publish = (topic, body, qos, retain) =>
  new Promise((done, fail) => client.publish(topic, body, { qos, retain }, (error) => (error ? fail(error) : done(""))));
const got = (topic, body, packet) => {
  const shown = body.length > BODY_MAX ? `#${body.length}` : body.toString();
  const found = `${topic || "-"} ${packet.qos} ${Number(packet.retain)} ${shown}`;
  const taker = takers.shift();
  taker ? taker(found) : messages.push(found);
};

const actions = {
  connect(port, clientId, clean, will) {
    client = mqtt.connect(`mqtt://127.0.0.1:${port}`, {
      protocolVersion: isV5 ? 5 : 4,
      clientId,
      clean: clean === "1",
      reconnectPeriod: 100,
      ...(isV5 && clean !== "1" && { properties: { sessionExpiryInterval: 60 } }),
      ...(will !== "-" && { will: { topic: will, payload: Buffer.from("gone"), qos: 1, retain: false } }),
    });
    client.on("message", got);
    client.on("error", (error) => console.error(String(error)));
    return inTime(new Promise((done) => client.once("connect", (packet) => done(Number(packet.sessionPresent)))), "no answer came");
  },
  subscribe(filter, qos) {
    const answer = new Promise((done, fail) =>
      client.subscribe(filter, { qos: Number(qos) }, (error, granted, packet) => {
        const codes = (packet ?? error?.packet)?.granted ?? granted?.map((each) => each.qos);
        codes?.length ? done(codes[0]) : fail(error ?? new Error("the answer has no code"));
      }),
    );
    return inTime(answer, "no answer came");
  },
  publish: (topic, qos, retain, body) => inTime(publish(topic, body, Number(qos), retain === "1"), "no acknowledgement came"),
  blob: (topic, size) => inTime(publish(topic, Buffer.alloc(Number(size)), 1, false), "no acknowledgement came"),
  next: () => (messages.length ? messages.shift() : inTime(new Promise((done) => takers.push(done)), "no message came")),
  waiting: () => messages.length,
  acked: () => acked,
  stream(topic, count) {
    const goOn = async () => {
      while (acked < Number(count)) {
        await publish(topic, String(acked), 1, false); // across lost connections: the client sends it again
        acked += 1;
      }
    };
    goOn();
    return "";
  },
  end: () => new Promise((done) => client.end(false, {}, () => done(""))),
};

const follow = async () => {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [action, ...words] = line.split(" ");
    try {
      console.log(`ok ${await actions[action](...words)}`);
    } catch (error) {
      console.log(`error ${error}`);
    }
  }
  process.exit(0);
};
follow();
