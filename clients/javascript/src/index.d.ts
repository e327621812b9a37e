// Types of the client and worker for Penstock.

export interface SecurityOptions {
  /** Token of a principal in the node's access file. */
  token?: string;
  /** Speak TLS. */
  tls?: boolean;
  /** PEM of the roots by which the node's certificate is checked. Implies `tls`. */
  rootCertificates?: Buffer;
}

export interface SendOptions {
  properties?: Record<string, string>;
  tag?: string;
  messageGroup?: string;
  /** Delay in seconds from when the node gets the message. */
  delay?: number;
  /** Delivery time in ms since 1970, instead of `delay`. */
  deliverAtMs?: number;
  deduplicationId?: string;
  responseTopic?: string;
  correlationData?: Uint8Array;
  contentType?: string;
  /** Nobody gets the message after so many seconds. */
  expireAfter?: number;
}

export interface SendReceipt {
  messageId: string;
  /** Recalls a delayed message; else empty. */
  recallHandle: string;
  /** The node had stored a message with this deduplication id before. */
  repeated: boolean;
}

export class Client {
  /** `timeout` of one call is in seconds (10). */
  constructor(target: string, options?: { timeout?: number } & SecurityOptions);
  send(topic: string, body?: Uint8Array | string | object, options?: SendOptions): Promise<SendReceipt>;
  close(): Promise<void>;
}

export interface Message {
  readonly messageId: string;
  readonly topic: string;
  readonly body: Buffer;
  readonly properties: Record<string, string>;
  readonly messageGroup: string;
  readonly tag: string;
  /** When the node stored the message, in ms since 1970. */
  readonly storedMs: number;
  readonly attempt: number;
  readonly responseTopic: string;
  readonly correlationData: Buffer;
  readonly contentType: string;
  readonly deduplicationId: string;
  readonly signal: AbortSignal;
}

export interface ConsumerOptions<Body> {
  group: string;
  concurrency?: number;
  /** How long a call may take, in seconds (60). */
  timeout?: number;
  /** After how many seconds a message comes back if the process dies (30). It is extended while its handler runs. */
  invisible?: number;
  start?: "earliest" | "latest";
  decode?: "bytes" | "text" | "json" | ((body: Buffer) => Body);
}

export interface Counts {
  handled: number;
  failed: number;
  timedOut: number;
  repliesRefused: number;
  deadLettered: number;
  returned: number;
  late: number;
}

export class Worker {
  /** `grace` is how long running handlers have when the worker stops, in seconds (30). */
  constructor(target?: string, options?: { grace?: number; log?: (text: string) => void } & SecurityOptions);
  consumer<Body = any>(filter: string, options: ConsumerOptions<Body>, handler: (body: Body, message: Message) => unknown): void;
  /** What the consumers have done, by `GROUP on FILTER`. */
  readonly counts: Record<string, Counts>;
  /** Why consumers get no messages now, by `GROUP on FILTER`. Empty if all is well. */
  readonly problems: Record<string, string>;
  stop(): void;
  run(options?: { signals?: boolean }): Promise<void>;
}

export class PopError extends Error {}
export class NodeUnavailable extends PopError {}
export class Overloaded extends PopError {}
export class RequestInvalid extends PopError {}
export class GroupUnknown extends PopError {}
export class NotAuthenticated extends PopError {}
export class NotPermitted extends PopError {}
export class CallFailed extends PopError {}
export class Refused extends PopError {
  readonly code: string;
}
export class Reject extends Error {}
export class RetryLater extends Error {
  /** `delay` is in seconds. */
  constructor(delay?: number, reason?: string);
  readonly delay: number;
}
