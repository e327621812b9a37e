// One MQTT.js client that does what the lines on stdin say, each a JSON object, and answers on stdout with one for each, and one for
// each event. Bodies are hexadecimal. Driven by tests/clients/mqtt_drivers.py.
"use strict";

const mqtt = require("mqtt");
const readline = require("node:readline");

let client = null;

const say = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);
const bytes = (hex) => Buffer.from(hex, "hex");
const shown = (properties) =>
  JSON.parse(JSON.stringify(properties ?? {}, (_, value) => (value?.type === "Buffer" ? Buffer.from(value.data).toString("hex") : value)));
const taken = (properties) =>
  properties?.correlationData === undefined ? properties : { ...properties, correlationData: bytes(properties.correlationData) };

const actions = {
  connect({ url, options }, answer) {
    const will = options.will && { ...options.will, payload: bytes(options.will.payload), properties: taken(options.will.properties) };
    client = mqtt.connect(url, { reconnectPeriod: 0, connectTimeout: 15000, ...options, ...(will && { will }) });
    let answered = false;
    const once = (line) => answered || ((answered = true), answer(line));
    client.on("connect", (packet) =>
      once({ code: packet.reasonCode ?? packet.returnCode, sessionPresent: packet.sessionPresent, properties: shown(packet.properties) }),
    );
    client.on("error", (error) => once({ code: error.code ?? -1, error: String(error) }));
    client.on("message", (topic, body, packet) =>
      say({ event: "message", topic, body: body.toString("hex"), qos: packet.qos, retain: packet.retain, dup: packet.dup, properties: shown(packet.properties) }),
    );
    client.on("disconnect", (packet) => say({ event: "disconnect", code: packet.reasonCode ?? 0 }));
    client.on("packetreceive", (packet) => packet.cmd === "pingresp" && say({ event: "pingresp" }));
    client.on("close", () => say({ event: "close" }));
  },
  subscribe({ filters, properties }, answer) {
    client.subscribe(filters, { properties }, (error, granted, packet) =>
      answer({ codes: (packet ?? error?.packet)?.granted ?? granted?.map((each) => each.qos) ?? [], error: error && String(error) }),
    );
  },
  unsubscribe({ filters }, answer) {
    client.unsubscribe(filters, (error, packet) => answer({ codes: packet?.granted ?? [], error: error && String(error) }));
  },
  publish({ topic, body, options }, answer) {
    client.publish(topic, bytes(body), { ...options, properties: taken(options.properties) }, (error, packet) =>
      answer({ code: error?.code ?? packet?.reasonCode ?? 0, error: error && String(error) }),
    );
  },
  drop(_, answer) {
    client.stream.destroy();
    answer({});
  },
  end(_, answer) {
    client.end(false, {}, () => answer({}));
  },
};

readline
  .createInterface({ input: process.stdin })
  .on("line", (line) => {
    const { action, ...rest } = JSON.parse(line);
    actions[action](rest, (found) => say({ event: "answer", ...found }));
  })
  .on("close", () => process.exit(0));
