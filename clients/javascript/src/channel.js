// Calls of penstock.pop.v1 over one connection.

import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { credentials, loadPackageDefinition, Metadata } from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { errorOfCall } from "./errors.js";

const PLACES = ["../pop.proto", "../../../pop/proto/pop.proto"].map((path) => fileURLToPath(new URL(path, import.meta.url)));
const { PopService } = loadPackageDefinition(
  loadSync(PLACES.find(existsSync), { longs: Number, enums: String, defaults: true }),
).penstock.pop.v1;

const OPTIONS = {
  "grpc.max_receive_message_length": -1, // The node bounds its responses.
  "grpc.initial_reconnect_backoff_ms": 50,
  "grpc.max_reconnect_backoff_ms": 5_000,
  "grpc.keepalive_time_ms": 20_000,
  "grpc.keepalive_timeout_ms": 10_000,
};

/** A connection to one node. */
export class Channel {
  /**
   * @param {string} target `HOST:PORT` of the node's gRPC listener.
   * @param {object} security `token`, `tls`, `rootCertificates` (PEM as a Buffer).
   */
  constructor(target, { token = "", tls = false, rootCertificates = null } = {}) {
    if (!/^(\[[^\]]+\]|[^:[\]]+):\d{1,5}$/.test(target)) {
      throw new TypeError(`target is ${JSON.stringify(target)}: give HOST:PORT of the node's gRPC listener (pop.listen)`);
    }
    this.target = target;
    this.token = token;
    const secure = tls || rootCertificates ? credentials.createSsl(rootCertificates) : credentials.createInsecure();
    this.stub = new PopService(target, secure, OPTIONS);
  }

  /**
   * Make a call. Unless `atOnce` is set, it waits within its timeout for a node that can't be reached.
   *
   * @param {AbortSignal} [signal] Cancels the call.
   */
  call(method, request, { timeoutMs = 10_000, atOnce = false, signal } = {}) {
    const metadata = new Metadata({ waitForReady: !atOnce });
    if (this.token) metadata.set("authorization", `Bearer ${this.token}`);
    return new Promise((resolve, reject) => {
      const call = this.stub[method](request, metadata, { deadline: Date.now() + timeoutMs }, (error, answer) => {
        signal?.removeEventListener("abort", cancel);
        if (error) reject(errorOfCall(error, this.target));
        else resolve(answer);
      });
      const cancel = () => call.cancel();
      signal?.addEventListener("abort", cancel, { once: true });
      if (signal?.aborted) call.cancel();
    });
  }

  close() {
    this.stub.close();
  }
}
