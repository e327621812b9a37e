// A worker of clients/javascript for the tests: prints a line for each call of a handler, and one when it has stopped.
//
//   node driver.mjs TARGET '{"concurrency": 4, ...}'

import { Client, Reject, RetryLater, Worker } from "../../../clients/javascript/src/index.js";

const [target, options] = process.argv.slice(2);
const { token, grace = 5, ...consuming } = JSON.parse(options);
const tell = (found) => process.stdout.write(`${JSON.stringify(found)}\n`);
const worker = new Worker(target, { token, grace, log: (text) => tell({ log: text }) });
const client = new Client(target, { token });
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
let running = 0;

worker.consumer("plant/#", { group: "billing", decode: "json", ...consuming }, async (body, message) => {
  running += 1;
  tell({ body, attempt: message.attempt, running });
  try {
    const first = message.attempt === 1;
    if (body.do === "throw" && first) throw new Error("no such meter");
    if (body.do === "later" && first) throw new RetryLater(60);
    if (body.do === "reject") throw new Reject("no such meter, ever");
    if (body.do === "hang" && first) await new Promise((resolve) => message.signal.addEventListener("abort", resolve));
    if (body.do === "sleep") await sleep(body.ms);
    if (body.do === "send") await client.send("out/1", body.text, { properties: { unit: "C" }, tag: "t", messageGroup: "g" });
    if (body.do === "ask") return { twice: body.value * 2 };
  } finally {
    running -= 1;
  }
});

try {
  await worker.run();
  tell({ stopped: worker.counts["billing on plant/#"] });
} catch (error) {
  tell({ error: error.constructor.name, message: error.message });
}
await client.close();
