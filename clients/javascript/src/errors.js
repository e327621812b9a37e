// Errors: what the node refuses, what it does not answer, and what a handler throws to decide about its message.

import { status } from "@grpc/grpc-js";
import { milliseconds } from "./durations.js";

/** Base of the errors of a client. */
export class PopError extends Error {
  constructor(message) {
    super(message);
    this.name = this.constructor.name;
  }
}

/** The node did not answer. It may have done what the call asked for. */
export class NodeUnavailable extends PopError {}
/** A bound of the node is reached, or its disk is full. Try again later. */
export class Overloaded extends PopError {}
/** The request breaks a rule. No later try succeeds. */
export class RequestInvalid extends PopError {}
/** There is no such group: it was deleted, or the node creates none by itself. */
export class GroupUnknown extends PopError {}
/** The node does not know who calls. */
export class NotAuthenticated extends PopError {}
/** The caller may not do this. */
export class NotPermitted extends PopError {}
/** The call failed for another reason. */
export class CallFailed extends PopError {}

/** The node refused one message or handle. `code` is the name of the reason in pop.proto, such as HANDLE_EXPIRED. */
export class Refused extends PopError {
  constructor(code, detail) {
    super(detail || code);
    this.code = code;
  }
}

/** Throw this in a handler to make a dead letter of the message, because no attempt will ever succeed. */
export class Reject extends Error {}

/** Throw this in a handler to return the message as a failed attempt, after a delay in seconds and the back-off of its group. */
export class RetryLater extends Error {
  constructor(delay = 0, reason = "") {
    milliseconds(delay, "delay");
    super(reason || `the handler asked for another attempt in ${delay} s`);
    /** In seconds. */
    this.delay = delay;
  }
}

const OF_CALLS = new Map([
  [status.UNAVAILABLE, NodeUnavailable],
  [status.DEADLINE_EXCEEDED, NodeUnavailable],
  [status.CANCELLED, NodeUnavailable],
  [status.ABORTED, NodeUnavailable],
  [status.RESOURCE_EXHAUSTED, Overloaded],
  [status.INVALID_ARGUMENT, RequestInvalid],
  [status.NOT_FOUND, GroupUnknown],
  [status.UNAUTHENTICATED, NotAuthenticated],
  [status.PERMISSION_DENIED, NotPermitted],
]);

/** Return the error for a call that ended with a gRPC status. */
export function errorOfCall(error, target) {
  const kind = OF_CALLS.get(error.code) ?? CallFailed;
  const detail = error.details || error.message;
  return new kind(kind === NodeUnavailable ? `the node at ${target} did not answer: ${detail}` : detail);
}

/** Return the error for the status of one message or handle; null if it is OK. */
export function errorOfStatus(found) {
  return !found || found.code === "OK" ? null : new Refused(found.code, found.detail);
}
