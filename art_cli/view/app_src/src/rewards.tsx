// Rewards as small marks: the number itself, on a tone between the lowest and the highest reward in sight.

import { reward as text } from "./numbers";

export interface Scale {
  low: number;
  high: number;
}

/** The range of these rewards; it has at least 0 to 1 where they lie within. */
export function scaleOf(rewards: (number | null)[]): Scale {
  const known = rewards.filter((value): value is number => value !== null);
  const low = known.reduce((least, value) => Math.min(least, value), 0);
  const high = known.reduce((most, value) => Math.max(most, value), low < 0 ? 0 : 1);
  return { low, high: high > low ? high : low + 1 };
}

interface ChipProps {
  value: number | null;
  scale: Scale;
  label: string; // whose reward it is
  href?: string;
  hasFailed?: boolean;
  isCurrent?: boolean;
  isOutOfTab?: boolean;
}

export function RewardChip({ value, scale, label, href, hasFailed, isCurrent, isOutOfTab }: ChipProps) {
  const says = `${label}: ${value === null ? (hasFailed ? "failed" : "no reward") : `reward ${text(value)}`}`;
  const part = value === null ? 0 : (value - scale.low) / (scale.high - scale.low);
  const shown = value === null ? (hasFailed ? "\u2715" : "\u2013") : text(value);
  const common = {
    class: value === null ? `chip ${hasFailed ? "is-failed" : "is-missing"}` : "chip",
    style: { "--part": `${Math.round(100 * part)}%` },
    title: says,
  };
  if (href === undefined) return <span {...common}>{shown}</span>;
  return (
    <a {...common} href={href} aria-label={says} aria-current={isCurrent ? "true" : undefined} tabIndex={isOutOfTab ? -1 : undefined}>
      {shown}
    </a>
  );
}
