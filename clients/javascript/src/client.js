// The client: sends messages.

import { Batcher } from "./batcher.js";
import { Channel } from "./channel.js";
import { milliseconds, positiveMilliseconds } from "./durations.js";
import { errorOfStatus, NotPermitted, PopError } from "./errors.js";

/** Messages of one call at most. */
const SEND_MAX = 1_000;

const SEND_OPTIONS = [
  "properties",
  "tag",
  "messageGroup",
  "delay",
  "deliverAtMs",
  "deduplicationId",
  "responseTopic",
  "correlationData",
  "contentType",
  "expireAfter",
];

/** A client of one node. All code of a process may share it. */
export class Client {
  #channel;
  #timeoutMs;
  #sends = new Batcher((messages) => this.#send(messages), SEND_MAX, { sizeOf: (message) => message.body.length });

  /**
   * @param {string} target `HOST:PORT` of the node's gRPC listener.
   * @param {object} options `timeout` of one call in seconds (10); `token`; `tls`; `rootCertificates`, a Buffer with PEM.
   */
  constructor(target, { timeout = 10, ...security } = {}) {
    this.#timeoutMs = positiveMilliseconds(timeout, "timeout");
    this.#channel = new Channel(target, security);
  }

  /**
   * Send a message; resolves with its receipt when it is durable. Messages that are sent at the same time share calls. Rejects
   * with Overloaded while 100,000 messages, or 64 MiB of them, wait for the node.
   *
   * @param {string} topic MQTT topic, without wildcards.
   * @param {Buffer|Uint8Array|string|object} body Bytes, text, or anything that JSON can write.
   * @param {object} options `properties`, `tag`, `messageGroup`, `delay` in seconds, `deliverAtMs` in ms since 1970,
   *   `deduplicationId`, `responseTopic`, `correlationData`, `contentType`, `expireAfter` in seconds.
   */
  send(topic, body = "", options = {}) {
    checkNames(options, SEND_OPTIONS);
    if (typeof topic !== "string") throw new TypeError(`the topic is ${topic}: give text`);
    const { deduplicationId, responseTopic, correlationData, contentType, expireAfter, delay, ...fields } = options;
    if (delay !== undefined) fields.delayMs = milliseconds(delay, "delay");
    const expireAfterMs = expireAfter === undefined ? undefined : milliseconds(expireAfter, "expireAfter");
    const extras = { deduplicationId, responseTopic, correlationData, contentType, expireAfterMs };
    const message = { topic, body: bytesOf(body), ...fields };
    if (Object.values(extras).some((value) => value !== undefined)) message.extras = extras;
    return this.#sends.submit(message);
  }

  async #send(messages) {
    let answer;
    try {
      answer = await this.#channel.call("send", { messages }, { timeoutMs: this.#timeoutMs });
    } catch (error) {
      if (!(error instanceof PopError)) throw error;
      if (!(error instanceof NotPermitted) || messages.length === 1) return messages.map(() => error);
      // The node stores no message of a call if it does not permit one. The others must not suffer.
      const results = [];
      for (const message of messages) results.push(...(await this.#send([message])));
      return results;
    }
    return answer.results.map(
      ({ status, messageId, recallHandle, repeated }) => errorOfStatus(status) ?? { messageId, recallHandle, repeated },
    );
  }

  /** Send what waits, and close the connection. */
  async close() {
    await this.#sends.flush();
    this.#channel.close();
  }
}

/** Check that options have known names. The protocol would drop others, so that a delay with another name would be none. */
export function checkNames(options, known) {
  for (const name of Object.keys(options)) {
    if (!known.includes(name)) throw new TypeError(`there is no option ${name}: use ${known.join(", ")}`);
  }
}

/** Return a body as bytes. */
export function bytesOf(body) {
  if (body instanceof Uint8Array) return body;
  return Buffer.from(typeof body === "string" ? body : JSON.stringify(body));
}
