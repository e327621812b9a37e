// Client and worker for Penstock.

export { Client } from "./client.js";
export {
  CallFailed,
  GroupUnknown,
  NodeUnavailable,
  NotAuthenticated,
  NotPermitted,
  Overloaded,
  PopError,
  Refused,
  Reject,
  RequestInvalid,
  RetryLater,
} from "./errors.js";
export { Worker } from "./worker.js";
