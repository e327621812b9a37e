// Gathers single items into few calls.

import { Overloaded } from "./errors.js";

const MIB = 1024 * 1024;

/** Items that wait or are under way, at most; a further one is refused. */
const UNANSWERED_MAX = 100_000;
/** Their bytes. */
const UNANSWERED_BYTES_MAX = 64 * MIB;

/** Sends items together, one call at a time. What arrives during a call goes out with the next one, in order. */
export class Batcher {
  #send;
  #max;
  #bytesMax;
  #sizeOf;
  #waiting = [];
  #unanswered = 0;
  #unansweredBytes = 0;
  #sending = null;

  /**
   * @param {(items: any[]) => Promise<any[]>} send Makes a call; returns an answer or an Error for each item.
   * @param {number} max Items of one call at most.
   * @param {object} options `sizeOf`, a function that returns the bytes of an item (by default items are too small to count);
   *   `bytesMax` (1 MiB) of one call. A larger item goes alone.
   */
  constructor(send, max, { sizeOf = () => 0, bytesMax = MIB } = {}) {
    this.#send = send;
    this.#max = max;
    this.#sizeOf = sizeOf;
    this.#bytesMax = bytesMax;
  }

  /** Add an item; return its answer, or throw its error. Throws Overloaded if too many wait. */
  async submit(item) {
    const size = this.#sizeOf(item);
    const bytes = this.#unansweredBytes;
    if (this.#unanswered && (this.#unanswered >= UNANSWERED_MAX || bytes + size > UNANSWERED_BYTES_MAX)) {
      const wait = `${this.#unanswered} messages with ${Math.round(bytes / MIB)} MiB wait for the node`;
      throw new Overloaded(`${wait}, which is the limit: await what \`send\` has returned before you send more`);
    }
    this.#unanswered += 1;
    this.#unansweredBytes += size;
    try {
      return await new Promise((resolve, reject) => {
        this.#waiting.push({ item, size, resolve, reject });
        this.#sending ??= this.#run();
      });
    } finally {
      this.#unanswered -= 1;
      this.#unansweredBytes -= size;
    }
  }

  /** Return when all items are answered. */
  async flush() {
    while (this.#sending) await this.#sending;
  }

  async #run() {
    await new Promise(setImmediate); // What this turn of the event loop adds goes along.
    while (this.#waiting.length) {
      const batch = this.#take();
      try {
        const answers = await this.#send(batch.map(({ item }) => item));
        batch.forEach(({ resolve, reject }, at) => (answers[at] instanceof Error ? reject(answers[at]) : resolve(answers[at])));
      } catch (error) {
        for (const { reject } of batch) reject(error);
      }
    }
    this.#sending = null;
  }

  #take() {
    const end = Math.min(this.#waiting.length, this.#max);
    let count = 1;
    for (let bytes = this.#waiting[0].size; count < end; count += 1) {
      bytes += this.#waiting[count].size;
      if (bytes > this.#bytesMax) break;
    }
    return this.#waiting.splice(0, count);
  }
}
