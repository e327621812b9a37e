// One consumer of a worker: pops as many messages as it can handle at once, extends them while they are handled, settles them.

import { randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { Batcher } from "./batcher.js";
import { bytesOf } from "./client.js";
import { milliseconds } from "./durations.js";
import {
  errorOfStatus,
  GroupUnknown,
  NodeUnavailable,
  NotPermitted,
  PopError,
  Refused,
  Reject,
  RequestInvalid,
  RetryLater,
} from "./errors.js";
import { decoderOf, Message } from "./message.js";

const WAIT_MS = 20_000;
const TIMEOUT_MS = 10_000;
const HANDLES_MAX = 4_096;
const RETRY_MS_MIN = 50;
const RETRY_MS_MAX = 5_000;

/** Runs one consumer. It never has a message that no handler takes at once, so none of them expires unseen. */
export class Consumer {
  #channel;
  #client;
  #plan;
  #log;
  #decode;
  #busy = new Set();
  #freed = () => {};
  #stopping = new AbortController();
  #attempts = randomBytes(4).toString("hex");
  #attempt = 0;
  #retryMs = RETRY_MS_MIN;
  #wasAnswered = false;
  #acks = new Batcher((handles) => this.#ack(handles), HANDLES_MAX);
  #changes = new Batcher((changes) => this.#change(changes), HANDLES_MAX);
  #ended = Promise.resolve();

  constructor(channel, client, plan, log) {
    this.#channel = channel;
    this.#client = client;
    this.#plan = plan;
    this.#log = (text) => log(`${this.name}: ${text}`);
    this.#decode = decoderOf(plan.decode);
    this.group = plan.group;
    /** Names the consumer. */
    this.name = `${plan.group} on ${plan.filter}`;
    /** Why the consumer gets no messages now; empty if all is well. */
    this.problem = "";
    this.counts = { handled: 0, failed: 0, timedOut: 0, repliesRefused: 0, deadLettered: 0, returned: 0, late: 0 };
  }

  // --- taking messages ------------------------------------------------------------------------------------------------

  /** Take and handle messages until `stop`. */
  run() {
    this.#ended = this.#poll();
    return this.#ended;
  }

  async #poll() {
    const { concurrency } = this.#plan;
    while (!this.#stopping.signal.aborted) {
      if (this.#busy.size >= concurrency) {
        await new Promise((resolve) => (this.#freed = resolve));
        continue;
      }
      const request = this.#request(concurrency - this.#busy.size, this.problem ? 0 : WAIT_MS);
      let answer;
      try {
        answer = await this.#channel.call("pop", request, {
          timeoutMs: TIMEOUT_MS + request.waitMs,
          atOnce: !this.problem, // The first poll says at once that the node is away. Those after it wait for it.
          signal: this.#stopping.signal,
        });
      } catch (error) {
        if (this.#stopping.signal.aborted) {
          await this.#returnLostAnswer(request);
          return;
        }
        if (!(error instanceof PopError)) throw error;
        if (error instanceof RequestInvalid && !this.#wasAnswered) throw error;
        await this.#waitAfter(error);
        continue;
      }
      if (this.problem) this.#log("gets messages again");
      this.problem = "";
      this.#wasAnswered = true;
      this.#retryMs = RETRY_MS_MIN;
      if (answer.messages.length) this.#attempt += 1;
      for (const popped of answer.messages) this.#begin(popped, answer.invisibleMs);
    }
  }

  #request(messagesMax, waitMs) {
    const { group, filter, invisibleMs, start } = this.#plan;
    const attemptId = `${this.#attempts}-${this.#attempt}`; // A poll whose answer was lost is repeated, and gets it again.
    return { group, filter, messagesMax, invisibleMs, waitMs, attemptId, start: start.toUpperCase() };
  }

  async #waitAfter(error) {
    const waitMs = this.#retryMs * (0.5 + Math.random() / 2);
    this.#retryMs = Math.min(2 * this.#retryMs, RETRY_MS_MAX);
    if (this.problem !== error.message) {
      const anew = error instanceof GroupUnknown ? "; a group that the worker creates begins anew" : "";
      this.#log(`${error.message}; the worker tries again and again${anew}`);
    }
    this.problem = error.message;
    await sleep(waitMs, undefined, { signal: this.#stopping.signal }).catch(() => {});
  }

  /** Return, uncounted, what a poll had got when it was cancelled. */
  async #returnLostAnswer(request) {
    try {
      const answer = await this.#channel.call("pop", { ...request, messagesMax: 1, waitMs: 0 }, { timeoutMs: 2_000, atOnce: true });
      await this.#giveBack(answer.messages.map(({ handle }) => handle));
    } catch (error) {
      if (!(error instanceof PopError)) throw error; // What the poll may have got comes back when its time is over.
    }
  }

  async #giveBack(handles) {
    this.counts.returned += handles.length;
    await Promise.all(handles.map((handle) => this.#settled(this.#changes.submit({ handle, suspend: true }))));
  }

  // --- handling one message -------------------------------------------------------------------------------------------

  #begin(popped, invisibleMs) {
    const aborter = new AbortController();
    const work = { message: new Message(popped, aborter.signal), aborter, isOver: false, extension: null };
    this.#busy.add(work);
    work.ended = this.#handle(work, invisibleMs).finally(() => {
      this.#busy.delete(work);
      this.#freed();
    });
  }

  async #handle(work, invisibleMs) {
    const { message } = work;
    let body;
    try {
      body = this.#decode(message.body);
    } catch (error) {
      await this.#deadLetter(message, `the body of ${message.body.length} bytes is not valid: ${error.message}`);
      return;
    }
    const watch = setInterval(() => (work.extension ??= this.#extend(work, invisibleMs)), invisibleMs / 2);
    const timeout = setTimeout(() => this.#timeOut(work), this.#plan.timeoutMs);
    let result;
    let failure = null;
    try {
      result = await this.#plan.handler(body, message);
    } catch (error) {
      failure = error instanceof Error ? error : new Error(String(error));
    } finally {
      clearInterval(watch);
      clearTimeout(timeout);
    }
    await work.extension;
    if (work.isOver) {
      if (!failure) this.counts.late += 1; // The message went back when the time was over.
      return;
    }
    if (!failure && result !== undefined && message.responseTopic) failure = await this.#reply(message, result);
    if (failure instanceof Reject) await this.#deadLetter(message, failure.message || "the handler rejected the message");
    else if (failure) await this.#fail(message, failure);
    else {
      this.counts.handled += 1;
      this.#acks.submit(message.handle).catch((error) => {
        this.counts.late += 1;
        this.#log(`an acknowledgement came too late or failed: ${error.message}`);
      });
    }
  }

  /** Send what a handler has returned; return why its message has failed, or null. */
  async #reply(message, result) {
    try {
      await this.#client.send(message.responseTopic, bytesOf(result), { correlationData: message.correlationData });
    } catch (error) {
      const isRefused = error instanceof NotPermitted || (error instanceof Refused && error.code !== "INTERNAL");
      if (!isRefused) return error;
      // Whoever sent the request chose the topic of the reply, so it is no failure of the handler.
      this.counts.repliesRefused += 1;
      const topic = JSON.stringify(message.responseTopic.slice(0, 80));
      this.#log(`the reply to a message from ${message.topic} was refused, and is dropped: ${topic}: ${error.message}`);
    }
    return null;
  }

  async #fail(message, error) {
    this.counts.failed += 1;
    this.#log(`the handler failed for a message from ${message.topic}, attempt ${message.attempt}: ${error.message}`);
    const invisibleMs = error instanceof RetryLater ? milliseconds(error.delay, "delay") : 0;
    await this.#settled(this.#changes.submit({ handle: message.handle, invisibleMs, nack: true, reason: shortened(`${error.name}: ${error.message}`) }));
  }

  async #deadLetter(message, reason) {
    this.counts.deadLettered += 1;
    this.#log(`message ${message.messageId} from ${message.topic} becomes a dead letter: ${reason}`);
    const request = { group: this.group, handles: [message.handle], reason: shortened(reason) };
    const answer = this.#channel.call("deadLetter", request, { timeoutMs: TIMEOUT_MS });
    await this.#settled(answer.then(({ statuses }) => throwIfRefused(statuses[0])));
  }

  #timeOut(work) {
    work.isOver = true;
    this.counts.failed += 1;
    this.counts.timedOut += 1;
    this.#log(`a handler did not end within its timeout of ${this.#plan.timeoutMs / 1000} s; its message goes back`);
    work.aborter.abort(new Error("the time of the handler is over"));
    const reason = `the handler did not end within its timeout of ${this.#plan.timeoutMs / 1000} s`;
    const change = { handle: work.message.handle, nack: true, reason };
    Promise.resolve(work.extension).then(() => this.#settled(this.#changes.submit(change)));
  }

  async #extend(work, invisibleMs) {
    const { message } = work;
    try {
      message.handle = await this.#changes.submit({ handle: message.handle, invisibleMs });
    } catch (error) {
      if (!(error instanceof PopError)) throw error;
      this.#log(`a message could not be extended: ${error.message}`);
      if (error instanceof Refused) return; // The delivery is over, so nothing tries again.
    }
    work.extension = null;
  }

  // --- telling the node -----------------------------------------------------------------------------------------------

  /** Await a call about a message. One that fails comes back at its deadline. */
  async #settled(answer) {
    try {
      return await answer;
    } catch (error) {
      if (!(error instanceof PopError)) throw error;
      this.#log(`a message comes back at its deadline: ${error.message}`);
      return undefined;
    }
  }

  async #ack(handles) {
    const endsMs = Date.now() + TIMEOUT_MS;
    for (let tries = 0; ; tries += 1) {
      try {
        const { statuses } = await this.#channel.call("ack", { group: this.group, handles }, { timeoutMs: TIMEOUT_MS });
        return statuses.map(errorOfStatus).map((error) => (tries && error?.code === "ALREADY_ACKED" ? null : error));
      } catch (error) {
        if (!(error instanceof NodeUnavailable) || Date.now() >= endsMs) throw error;
        await sleep(RETRY_MS_MIN);
      }
    }
  }

  async #change(changes) {
    const { results } = await this.#channel.call("changeInvisible", { group: this.group, changes }, { timeoutMs: TIMEOUT_MS });
    return results.map(({ status, handle }) => errorOfStatus(status) ?? handle);
  }

  // --- stopping -------------------------------------------------------------------------------------------------------

  /** Take no more messages, let handlers end within the grace, and return all other messages uncounted. */
  async stop(graceMs) {
    this.#stopping.abort();
    this.#freed();
    await this.#ended.catch(() => {});
    const ended = Promise.all([...this.#busy].map((work) => work.ended));
    await Promise.race([ended, sleep(graceMs, undefined, { ref: false })]);
    const late = [...this.#busy].filter((work) => !work.isOver);
    for (const work of late) {
      work.isOver = true;
      work.aborter.abort(new Error("the worker has stopped"));
      await work.extension;
    }
    if (late.length) this.#log(`${late.length} handlers did not end within the grace of ${graceMs / 1000} s; their messages go back`);
    await this.#giveBack(late.map((work) => work.message.handle));
    await Promise.all([this.#acks.flush(), this.#changes.flush()]);
  }
}

function throwIfRefused(status) {
  const error = errorOfStatus(status);
  if (error) throw error;
}

/** What the node stores of the reason of a failure: up to 2,000 bytes. A UTF-16 unit takes up to three. */
function shortened(reason) {
  return reason.slice(0, 660);
}
