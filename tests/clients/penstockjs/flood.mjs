// Sends messages of 1 MiB at once, and prints what came of them: how many the node has stored, and the errors of the others.
//
//   node flood.mjs TARGET COUNT

import { Client } from "../../../clients/javascript/src/index.js";

const [target, count] = process.argv.slice(2);
const client = new Client(target);
const body = Buffer.alloc(1024 * 1024);
const results = await Promise.allSettled(Array.from({ length: Number(count) }, () => client.send("plant/1/t", body)));
await client.close();
const errors = results.filter(({ status }) => status === "rejected").map(({ reason }) => `${reason.name}: ${reason.message}`);
console.log(JSON.stringify({ stored: results.length - errors.length, errors }));
