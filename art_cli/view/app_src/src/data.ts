// Where answers come from: the server that served the page, or the data inside the file that it is.

import { useEffect, useReducer } from "preact/hooks";
import type { GroupRows, Sources } from "./contract";
import { pageOfRows } from "./rows";

interface Provider {
  isFile: boolean;
  /** The answer as JSON text, or as what it says. */
  get(url: string, signal: AbortSignal): Promise<{ text: string } | { value: unknown }>;
}

const REQUEST_S = 60;

const live: Provider = {
  isFile: false,
  async get(url, signal) {
    const answer = await fetch(url, { signal: AbortSignal.any([signal, AbortSignal.timeout(REQUEST_S * 1000)]) });
    const text = await answer.text();
    if (!answer.ok) throw new Error(reasonIn(text) ?? `the server answered ${answer.status}`);
    return { text };
  },
};

/** What the server answers to a JSON value. Throws an Error with its reason. */
export async function post<T>(url: string, value: object, seconds: number, signal?: AbortSignal): Promise<T> {
  const signals = [AbortSignal.timeout(seconds * 1000), ...(signal ? [signal] : [])];
  const headers = { "content-type": "application/json" };
  const answer = await fetch(url, { method: "POST", headers, body: JSON.stringify(value), signal: AbortSignal.any(signals) });
  const text = await answer.text();
  if (!answer.ok) throw new Error(reasonIn(text) ?? `the server answered ${answer.status}`);
  return JSON.parse(text) as T;
}

function reasonIn(text: string): string | null {
  try {
    const { error } = JSON.parse(text) as { error?: unknown };
    return typeof error === "string" ? error : null;
  } catch {
    return null;
  }
}

/** What a file has: parts that are gzip in base64, each opened when it is needed. */
interface Packed {
  main: string; // {"answers": {URL: answer}, "where": {URL: number of its part}}
  parts: string[];
}

type Answers = Record<string, unknown>;

async function opened(part: string): Promise<unknown> {
  const bytes = Uint8Array.from(atob(part), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

function byPath<T>(record: Record<string, T>): Map<string, T> {
  return new Map(Object.entries(record).map(([url, value]) => [plain(url), value]));
}

const MAX_OPEN = 8; // parts that stay open

function fileProvider(text: string): Provider {
  const packed = JSON.parse(text) as Packed;
  const main = opened(packed.main).then((found) => {
    const { answers, where } = found as { answers: Answers; where: Record<string, number> };
    return { answers: byPath(answers), where: byPath(where) };
  });
  const open = new Map<number, Promise<Map<string, unknown>>>();
  const answersOf = (number: number) => {
    const known = open.get(number) ?? opened(packed.parts[number] ?? "").then((part) => byPath(part as Answers));
    open.delete(number); // the newest use goes to the end
    open.set(number, known);
    for (const [oldest] of open) {
      if (open.size <= MAX_OPEN) break;
      open.delete(oldest);
    }
    return known;
  };
  return {
    isFile: true,
    async get(url) {
      const [path = "", query = ""] = url.split("?", 2);
      const { answers, where } = await main;
      const number = where.get(plain(path));
      const answer = number === undefined ? answers.get(plain(path)) : (await answersOf(number)).get(plain(path));
      if (answer === undefined) throw new Error("this is not in the file: it was left out to keep the file small");
      return { value: path.endsWith("/groups") ? pageOfRows(answer as GroupRows, new URLSearchParams(query)) : answer };
    },
  };
}

/** A URL as both sides would write it, whatever each of them escapes. */
function plain(url: string): string {
  try {
    return decodeURIComponent(url);
  } catch {
    return url;
  }
}

const embedded = document.getElementById("data");
export const provider: Provider = embedded === null ? live : fileProvider(embedded.textContent ?? "{}");

// --- the cache: an answer stays shown until a newer one is there --------------------------------------------------------

interface Entry {
  revision: number;
  text: string | null; // the answer as it came, to see whether a newer one differs
  value: unknown;
  error: string | null;
  loading: AbortController | null;
}

const MAX_ENTRIES = 80;
const entries = new Map<string, Entry>();
const listeners = new Map<string, Set<() => void>>();
let revision = 0;

function entryOf(url: string): Entry {
  let entry = entries.get(url);
  if (entry !== undefined) entries.delete(url); // the newest use goes to the end
  entry ??= { revision: -1, text: null, value: undefined, error: null, loading: null };
  entries.set(url, entry);
  for (const [old] of entries) {
    if (entries.size <= MAX_ENTRIES) break;
    if (!listeners.get(old)?.size) entries.delete(old);
    else break;
  }
  return entry;
}

function tell(url: string): void {
  for (const listener of listeners.get(url) ?? []) listener();
}

async function load(url: string): Promise<void> {
  const entry = entryOf(url);
  if (entry.loading !== null || entry.revision >= revision) return;
  const wanted = revision;
  entry.loading = new AbortController();
  try {
    const answer = await provider.get(url, entry.loading.signal);
    if ("value" in answer) entry.value = answer.value;
    else if (answer.text !== entry.text) [entry.text, entry.value] = [answer.text, JSON.parse(answer.text) as unknown];
    entry.error = null;
  } catch (error) {
    entry.error = error instanceof Error ? error.message : String(error);
  }
  entry.loading = null;
  entry.revision = wanted;
  tell(url);
  if (listeners.get(url)?.size && entry.revision < revision) void load(url);
}

export interface Loaded<T> {
  value: T | undefined;
  error: string | null;
}

/** The answers of these URLs, in their order; each is asked again when the revision grows. */
export function useAnswers<T>(urls: string[]): Loaded<T>[] {
  const [, redraw] = useReducer((count: number) => count + 1, 0);
  const key = urls.join("\n");
  useEffect(() => {
    const told = () => redraw(undefined);
    for (const url of urls) {
      let known = listeners.get(url);
      if (known === undefined) listeners.set(url, (known = new Set()));
      known.add(told);
      void load(url);
    }
    return () => {
      for (const url of urls) listeners.get(url)?.delete(told);
    };
  }, [key]);
  return urls.map((url) => {
    const entry = entries.get(url);
    return { value: entry?.value as T | undefined, error: entry?.error ?? null };
  });
}

export function useAnswer<T>(url: string | null): Loaded<T> {
  return useAnswers<T>(url === null ? [] : [url])[0] ?? { value: undefined, error: null };
}

// --- following a run ----------------------------------------------------------------------------------------------------

const BUSY_MS = 2000; // pause between two looks while a source is running or indexing
const IDLE_MS = 15000; // pause when nothing is known to change

export const SOURCES = "/api/sources";

/** At the first look: whether what was loaded is of this revision. It then counts as such. */
function isOfNow(): boolean {
  const sources = entries.get(SOURCES)?.value as Sources | undefined;
  if (sources?.revision !== revision) return false;
  for (const entry of entries.values()) entry.revision = revision;
  return true;
}

/** Follows the sources; `isLost` is true while the server does not answer. */
export function useFollowing(onChange: () => void): { sources: Loaded<Sources>; isLost: boolean } {
  const sources = useAnswer<Sources>(SOURCES);
  const [lost, setLost] = useReducer((_: boolean, next: boolean) => next, false);
  const isBusy = sources.value?.sources.some((source) => source.is_running || source.indexing !== null) ?? false;
  useEffect(() => {
    if (provider.isFile) return;
    const ends = new AbortController();
    const look = async () => {
      if (document.hidden) return;
      try {
        const found = await provider.get("/api/revision", ends.signal);
        const answer = JSON.parse("text" in found ? found.text : "{}") as { revision: number };
        setLost(false);
        const isFirst = revision === 0;
        if (answer.revision === revision) return;
        revision = answer.revision;
        if (isFirst && isOfNow()) return;
        for (const [url, known] of listeners) if (known.size) void load(url);
        if (!isFirst) onChange();
      } catch {
        if (!ends.signal.aborted) setLost(true);
      }
    };
    void look();
    let timer = 0;
    const again = () => {
      timer = window.setTimeout(async () => {
        await look();
        if (!ends.signal.aborted) again();
      }, isBusy ? BUSY_MS : IDLE_MS);
    };
    again();
    document.addEventListener("visibilitychange", look);
    return () => {
      ends.abort();
      window.clearTimeout(timer);
      document.removeEventListener("visibilitychange", look);
    };
  }, [isBusy]);
  return { sources, isLost: lost };
}
