// A message that a handler gets.

/** A message of a group. The worker settles it by how its handler ends. */
export class Message {
  constructor(popped, signal) {
    /** Names this delivery to the node. An extension replaces it. */
    this.handle = popped.handle;
    this.messageId = popped.messageId;
    this.topic = popped.topic;
    /** The bytes, as a Buffer. */
    this.body = popped.body;
    this.properties = popped.properties;
    this.messageGroup = popped.messageGroup;
    this.tag = popped.tag;
    this.storedMs = popped.storedMs;
    /** Number of this delivery attempt; 1 for the first. */
    this.attempt = popped.attempt;
    this.responseTopic = popped.responseTopic;
    this.correlationData = popped.correlationData;
    this.contentType = popped.contentType;
    this.deduplicationId = popped.deduplicationId;
    /** Aborted when the time of the handler is over, or the worker has stopped: the message goes back. */
    this.signal = signal;
  }
}

const DECODERS = {
  bytes: (body) => body,
  text: (body) => new TextDecoder("utf-8", { fatal: true }).decode(body),
  json: (body) => JSON.parse(DECODERS.text(body)),
};

/** Return the function that decodes a body. */
export function decoderOf(decode) {
  const found = typeof decode === "function" ? decode : DECODERS[decode];
  if (!found) throw new TypeError(`decode is ${JSON.stringify(decode)}: use bytes, text, json, or a function`);
  return found;
}
