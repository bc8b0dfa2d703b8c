// Sorting, filtering and paging of groups, for a file; a server does the same before it answers.

import type { GroupRow, GroupRows } from "./contract";

export function pageOfRows(answer: GroupRows, query: URLSearchParams): GroupRows {
  const kept = answer.rows.filter((row) => isWanted(row, query));
  const sorted = sortedRows(kept, query.get("sort") ?? "index", query.get("order") === "desc");
  const offset = Number(query.get("offset") ?? 0);
  return { total: sorted.length, rows: sorted.slice(offset, offset + Number(query.get("limit") ?? 100)) };
}

function isWanted(row: GroupRow, query: URLSearchParams): boolean {
  if ((query.get("source") ?? "") !== "" && row.source !== query.get("source")) return false;
  if (query.get("errors") === "1" && row.num_errors === 0) return false;
  const low = Number(query.get("min") ?? -Infinity);
  const high = Number(query.get("max") ?? Infinity);
  const hasBounds = query.has("min") || query.has("max");
  if (hasBounds && !row.rewards.some((reward) => reward !== null && reward >= low && reward <= high)) return false;
  const text = query.get("text")?.toLowerCase() ?? "";
  const inside = `${row.label}\n${row.scenario_id}\n${row.group_id}\n${row.error ?? ""}\n${row.text ?? ""}`;
  return inside.toLowerCase().includes(text);
}

const KEYS: Record<string, (row: GroupRow) => number | null> = {
  reward: (row) => row.mean,
  spread: (row) => row.spread,
  errors: (row) => row.num_errors,
  length: (row) => row.num_tokens,
};

function sortedRows(rows: GroupRow[], sort: string, isDescending: boolean): GroupRow[] {
  const key = KEYS[sort];
  if (key === undefined) return isDescending ? rows.toReversed() : rows;
  const known = rows.filter((row) => key(row) !== null);
  const unknown = rows.filter((row) => key(row) === null); // at the end in both orders
  known.sort((a, b) => ((key(a) ?? 0) - (key(b) ?? 0)) * (isDescending ? -1 : 1));
  return [...known, ...unknown];
}
