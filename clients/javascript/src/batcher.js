// Gathers single items into few calls.

/** Sends items together, one call at a time. What arrives during a call goes out with the next one, in order. */
export class Batcher {
  #send;
  #max;
  #waiting = [];
  #sending = null;

  /**
   * @param {(items: any[]) => Promise<any[]>} send Makes a call; returns an answer or an Error for each item.
   * @param {number} max Items of one call at most.
   */
  constructor(send, max) {
    this.#send = send;
    this.#max = max;
  }

  /** Add an item; return its answer, or throw its error. */
  submit(item) {
    return new Promise((resolve, reject) => {
      this.#waiting.push({ item, resolve, reject });
      this.#sending ??= this.#run();
    });
  }

  /** Return when all items are answered. */
  async flush() {
    while (this.#sending) await this.#sending;
  }

  async #run() {
    await new Promise(setImmediate); // What this turn of the event loop adds goes along.
    while (this.#waiting.length) {
      const batch = this.#waiting.splice(0, this.#max);
      try {
        const answers = await this.#send(batch.map(({ item }) => item));
        batch.forEach(({ resolve, reject }, at) => (answers[at] instanceof Error ? reject(answers[at]) : resolve(answers[at])));
      } catch (error) {
        for (const { reject } of batch) reject(error);
      }
    }
    this.#sending = null;
  }
}
