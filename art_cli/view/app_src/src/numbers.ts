// Numbers as people read them.

const MINUS = "\u2212";

/** Example: 0.4297 -> "0.430", 12345 -> "12,345", 6.3e-7 -> "6.3e-7", null -> "–". */
export function number(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "\u2013";
  const size = Math.abs(value);
  let text: string;
  if (Number.isInteger(value) && size < 1e15) text = size.toLocaleString("en-US");
  else if (size !== 0 && (size < 1e-3 || size >= 1e7)) text = size.toExponential(1).replace("e+", "e");
  else if (size >= 1000) text = Math.round(size).toLocaleString("en-US");
  else text = size >= 100 ? size.toFixed(1) : size >= 10 ? size.toFixed(2) : size.toFixed(3);
  return value < 0 ? MINUS + text : text;
}

/** A reward in few characters: "1", "0.50", "0.33", "\u22121", "12.5". */
export function reward(value: number | null | undefined): string {
  if (value === null || value === undefined) return "\u2013";
  const size = Math.abs(value);
  const text = Number.isInteger(value) || size >= 1000 ? number(size) : size >= 100 ? size.toFixed(0) : size.toFixed(size >= 10 ? 1 : 2);
  return value < 0 ? MINUS + text : text;
}

/** A number of a column: three places behind the point, so that numbers below each other can be compared. */
export function decimal(value: number | null): string {
  return value === null || Math.abs(value) >= 1000 ? number(value) : (value < 0 ? MINUS : "") + Math.abs(value).toFixed(3);
}

export function signed(value: number | null | undefined): string {
  return value !== null && value !== undefined && value > 0 ? `+${number(value)}` : number(value);
}

/** A mean count: "3.5", "12", "5,000". */
export function average(value: number | null): string {
  return value === null ? "\u2013" : value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en-US");
}

export function count(value: number, noun: string, plural = `${noun}s`): string {
  return `${value.toLocaleString("en-US")} ${value === 1 ? noun : plural}`;
}

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return "\u2013";
  if (value < 0.0005) return "0 ms";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

export function mean(values: (number | null | undefined)[]): number | null {
  const known = values.filter((value): value is number => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}
