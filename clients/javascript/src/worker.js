// The worker: handlers on the messages of groups.

import { checkNames, Client } from "./client.js";
import { Channel } from "./channel.js";
import { Consumer } from "./consumer.js";
import { positiveMilliseconds, timerMilliseconds } from "./durations.js";
import { decoderOf } from "./message.js";

const DEFAULTS = { concurrency: 16, timeout: 60, invisible: 30, decode: "bytes", start: "earliest" };

/** Runs the consumers of an application until `stop`, SIGTERM or SIGINT. */
export class Worker {
  #target;
  #security;
  #graceMs;
  #log;
  #plans = [];
  #consumers = [];
  #stopped = Promise.withResolvers?.() ?? withResolvers();

  /**
   * @param {string} target `HOST:PORT` of the node's gRPC listener. By default PENSTOCK_TARGET, or 127.0.0.1:8081.
   * @param {object} options `grace` in seconds (30) for running handlers when the worker stops; `log`, a function of a text
   *   (console.error); `token`; `tls`; `rootCertificates`, a Buffer with PEM.
   */
  constructor(target = "", { grace = 30, log = console.error, ...security } = {}) {
    this.#target = target || process.env.PENSTOCK_TARGET || "127.0.0.1:8081";
    this.#security = security;
    this.#graceMs = timerMilliseconds(grace, "grace");
    this.#log = log;
  }

  /**
   * Let a function handle the messages of a group. What it returns is the reply, if its message asks for one.
   *
   * @param {string} filter MQTT topic filter, or `$dlq/GROUP`.
   * @param {object} options `group`; `concurrency` (16); `timeout` of a call in seconds (60); `invisible` in seconds (30), in
   *   which a message comes back if the process dies; `start` (`earliest` or `latest`) of a group that the worker creates; `decode`:
   *   `bytes` (the default), `text`, `json`, or a function of the bytes.
   * @param {(body, message) => any} handler Throws to return the message as a failed attempt. `message.signal` is aborted when
   *   the time is over.
   */
  consumer(filter, options, handler) {
    if (typeof handler !== "function") throw new TypeError("the handler is no function: consumer(filter, options, handler)");
    if (!options?.group) throw new TypeError("name the group: consumer(filter, { group: ... }, handler)");
    checkNames(options, ["group", ...Object.keys(DEFAULTS)]);
    const plan = { ...DEFAULTS, ...options, filter, handler };
    if (!["earliest", "latest"].includes(plan.start)) throw new TypeError(`start is ${plan.start}: use earliest or latest`);
    if (!(plan.concurrency >= 1)) throw new RangeError(`concurrency is ${plan.concurrency}: use 1 or more`);
    plan.timeoutMs = positiveMilliseconds(plan.timeout, "timeout");
    plan.invisibleMs = positiveMilliseconds(plan.invisible, "invisible");
    decoderOf(plan.decode);
    this.#plans.push(plan);
  }

  /** What the consumers have done, by `GROUP on FILTER`. */
  get counts() {
    return Object.fromEntries(this.#consumers.map((consumer) => [consumer.name, consumer.counts]));
  }

  /** Why consumers get no messages now, by `GROUP on FILTER`. Empty if all is well. */
  get problems() {
    return Object.fromEntries(this.#consumers.filter((each) => each.problem).map((each) => [each.name, each.problem]));
  }

  /** Stop taking messages. `run` ends when the handlers have ended, or their grace is over. */
  stop() {
    this.#stopped.resolve();
  }

  /** Run all consumers. Rejects with RequestInvalid if the node refuses a filter or the name of a group. */
  async run({ signals = true } = {}) {
    if (!this.#plans.length) throw new TypeError("the worker has no consumer: call consumer(filter, options, handler)");
    const channel = new Channel(this.#target, this.#security);
    const client = new Client(this.#target, this.#security);
    const stop = () => this.stop();
    if (signals) for (const name of ["SIGTERM", "SIGINT"]) process.on(name, stop);
    this.#consumers = this.#plans.map((plan) => new Consumer(channel, client, plan, this.#log));
    try {
      const running = this.#consumers.map((consumer) => consumer.run());
      await Promise.race([this.#stopped.promise, ...running]);
    } finally {
      await Promise.all(this.#consumers.map((consumer) => consumer.stop(this.#graceMs)));
      if (signals) for (const name of ["SIGTERM", "SIGINT"]) process.off(name, stop);
      await client.close();
      channel.close();
    }
  }
}

function withResolvers() {
  const found = {};
  found.promise = new Promise((resolve, reject) => Object.assign(found, { resolve, reject }));
  return found;
}
