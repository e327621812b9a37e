// Durations: seconds for the application, whole milliseconds for the protocol.

/** Longest duration in seconds: a hundred years. A longer one is a mistake, such as a point in time. */
const SECONDS_MAX = 100 * 366 * 86_400;

/** Longest time of a timer of JavaScript. A longer one would end at once. */
const TIMER_MS_MAX = 2 ** 31 - 1;

/**
 * Return a duration in milliseconds: the nearest whole number, which is at least 1 unless the duration is 0.
 *
 * @param {number} seconds The duration in seconds.
 * @param {string} name Names the option in the error.
 */
export function milliseconds(seconds, name) {
  if (typeof seconds !== "number" || Number.isNaN(seconds)) {
    throw new TypeError(`${name} is ${JSON.stringify(seconds)}: give a number of seconds`);
  }
  if (seconds < 0) throw new RangeError(`${name} is ${seconds} seconds: use 0 or more`);
  if (seconds > SECONDS_MAX) {
    throw new RangeError(`${name} is ${seconds} seconds, which is more than a hundred years: give a duration in seconds`);
  }
  return seconds && Math.max(Math.round(seconds * 1000), 1);
}

/** Return a duration in milliseconds that a timer can wait for, up to 24 days. */
export function timerMilliseconds(seconds, name) {
  const ms = milliseconds(seconds, name);
  if (ms > TIMER_MS_MAX) throw new RangeError(`${name} is ${seconds} seconds: use at most ${Math.floor(TIMER_MS_MAX / 1000)}`);
  return ms;
}

/** Return a duration above 0 in milliseconds that a timer can wait for. */
export function positiveMilliseconds(seconds, name) {
  const ms = timerMilliseconds(seconds, name);
  if (!ms) throw new RangeError(`${name} is 0: use more than 0 seconds`);
  return ms;
}
