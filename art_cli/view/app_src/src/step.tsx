// One step: the histogram of its rewards, and its groups as rows that are sorted, filtered and searched.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { GroupRow, GroupRows, HistogramBins, Source, Sources, StepSummary } from "./contract";
import { Bars, Lines } from "./chart";
import { provider, useAnswer, useAnswers } from "./data";
import { useKeys } from "./keys";
import { average, count, decimal, number, reward as rewardText } from "./numbers";
import { go, link, setQuery, type Route } from "./route";
import { RewardChip, scaleOf, type Scale } from "./rewards";
import { useRoving } from "./roving";
import { Heading, Notice, Waiting } from "./shell";
import { Label } from "./text";
import { VirtualList, type ListHandle } from "./virtual";

type StepRoute = Extract<Route, { page: "step" }>;

const PAGE = 100; // rows of one request
const ROW_HEIGHT = 44;

interface StepProps {
  sources: Sources;
  route: StepRoute;
  query: URLSearchParams;
}

export function StepView({ sources, route, query }: StepProps) {
  const source = sources.sources.find((each) => each.id === route.source);
  if (source === undefined) return <Notice title="There is no such run here">The link may belong to another page.</Notice>;
  const summary = source.steps.find((each) => each.step === route.step && each.split === route.split);
  return (
    <div class="page">
      <StepHead sources={sources} source={source} route={route} summary={summary} query={query} />
      <div class="with-side">
        <Side route={route} query={query} summary={summary} />
        <Groups route={route} query={query} summary={summary} />
      </div>
    </div>
  );
}

// --- which step ---------------------------------------------------------------------------------------------------------

interface HeadProps {
  sources: Sources;
  source: Source;
  route: StepRoute;
  summary: StepSummary | undefined;
  query: URLSearchParams;
}

function StepHead({ sources, source, route, summary, query }: HeadProps) {
  const steps = source.steps.filter((each) => each.split === route.split);
  const here = steps.findIndex((each) => each.step === route.step);
  const splits = [...new Set(source.steps.map((each) => each.split))].sort().reverse(); // training first
  const kept = query.toString();
  const turn = (by: number) => {
    const next = steps[here + by];
    if (next) go(link.step(source.id, next.step, next.split, kept));
  };
  useKeys([
    { keys: ["ArrowLeft"], says: "previous step", run: () => turn(-1) },
    { keys: ["ArrowRight"], says: "next step", run: () => turn(1) },
  ]);
  const points = useMemo(() => steps.map((each): [number, number | null] => [each.step, each.mean_reward]), [source.steps, route.split]);
  const lines = useMemo(() => [{ name: `${route.split} reward`, points, tone: "--series-1", hasDots: steps.length < 40 }], [points]);
  const nearSplit = (split: string) => nearest(source.steps.filter((each) => each.split === split), route.step);
  return (
    <div class="head">
      <Crumbs sources={sources} source={source} />
      <div class="step-head">
        <Heading title={`Step ${route.step}, ${route.split}, ${source.name}`}>
          {source.kind === "file" ? "Groups" : `Step ${route.step}`}
        </Heading>
        {steps.length > 1 && (
          <div class="stepper">
            <button type="button" onClick={() => turn(-1)} disabled={here <= 0} aria-label="Previous step">
              {"\u2039"}
            </button>
            <select aria-label="Step" value={String(route.step)} onChange={(event) => go(link.step(source.id, Number(event.currentTarget.value), route.split, kept))}>
              {steps.map((each) => (
                <option key={each.step} value={each.step}>
                  step {each.step}
                </option>
              ))}
            </select>
            <button type="button" onClick={() => turn(1)} disabled={here < 0 || here >= steps.length - 1} aria-label="Next step">
              {"\u203a"}
            </button>
          </div>
        )}
        {splits.length > 1 && (
          <div class="segmented" role="group" aria-label="Split">
            {splits.map((split) => (
              <button key={split} type="button" aria-pressed={split === route.split} onClick={() => go(link.step(source.id, nearSplit(split)?.step ?? 0, split, kept))}>
                {split === "train" ? "training" : split === "eval" ? "evaluation" : split}
              </button>
            ))}
          </div>
        )}
        {!provider.isFile && <a href={link.label(source.id, route.step, route.split)}>label pairs</a>}
        {summary && (
          <p class="facts">
            <span>{count(summary.num_groups, "group")}</span>
            <span>{count(summary.num_trajectories, "attempt")}</span>
            <span>
              mean reward <b class="num">{number(summary.mean_reward)}</b>
            </span>
          </p>
        )}
      </div>
      {summary?.problems?.map((problem) => (
        <p key={problem} class="failed small">
          <Label text={problem} max={300} />
        </p>
      ))}
      {steps.length > 2 && (
        <div class="strip">
          <Lines lines={lines} height={46} isBare label="Mean reward by step" at={route.step} onStep={(step) => go(link.step(source.id, step, route.split, kept))} />
        </div>
      )}
    </div>
  );
}

function nearest(steps: StepSummary[], step: number): StepSummary | undefined {
  return steps.toSorted((a, b) => Math.abs(a.step - step) - Math.abs(b.step - step))[0];
}

/** Which of several sources; nothing where there is one. */
function Crumbs({ sources, source }: { sources: Sources; source: Source }) {
  if (sources.sources.length === 1) return null;
  const open = (id: string) => {
    const chosen = sources.sources.find((each) => each.id === id);
    const last = chosen?.steps.findLast((each) => each.split === "train") ?? chosen?.steps.at(-1);
    if (chosen && last) go(link.step(chosen.id, last.step, last.split));
  };
  return (
    <select class="run-choice" aria-label="Run" value={source.id} onChange={(event) => open(event.currentTarget.value)}>
      {sources.sources
        .filter((each) => each.steps.length > 0)
        .map((each) => (
          <option key={each.id} value={each.id}>
            {each.name}
          </option>
        ))}
    </select>
  );
}

// --- histogram and filters ----------------------------------------------------------------------------------------------

function Side({ route, query, summary }: GroupsProps) {
  const found = useAnswer<HistogramBins>(`${base(route)}/histogram`);
  const chosen = query.has("min") && query.has("max") ? { low: Number(query.get("min")), high: Number(query.get("max")) } : null;
  const bins = found.value?.bins ?? [];
  const sources = summary?.sources ?? [];
  return (
    <aside class="side" aria-label="Filters">
      <section>
        <h2>Rewards</h2>
        {bins.length > 0 ? (
          <Bars
            bars={bins}
            height={150}
            label="Histogram of rewards. Each bar filters the groups."
            noun="rewards"
            chosen={chosen}
            onChoose={(bar) => setQuery({ min: bar === null ? null : String(bar.low), max: bar === null ? null : String(bar.high) })}
          />
        ) : (
          <p class="soft">{found.value ? "No attempt has a reward." : (found.error ?? "Reading \u2026")}</p>
        )}
        <p class="soft small">
          {chosen ? (
            <>
              Groups with an attempt {chosen.low === chosen.high ? `of ${rewardText(chosen.low)}` : `from ${rewardText(chosen.low)} to ${rewardText(chosen.high)}`}.{" "}
              <button type="button" class="quiet" onClick={() => setQuery({ min: null, max: null })}>
                show all
              </button>
            </>
          ) : (
            bins.length > 0 && "Click a bar to see its groups."
          )}
          {(found.value?.missing ?? 0) > 0 && ` ${count(found.value?.missing ?? 0, "attempt has", "attempts have")} no reward.`}
        </p>
      </section>
      <section class="filters">
        <SearchField value={query.get("text") ?? ""} />
        <label class="check">
          <input type="checkbox" checked={query.get("errors") === "1"} onChange={(event) => setQuery({ errors: event.currentTarget.checked ? "1" : null })} />
          only groups with failed attempts
        </label>
        {sources.length > 0 && (
          <select aria-label="Source" value={query.get("source") ?? ""} onChange={(event) => setQuery({ source: event.currentTarget.value })}>
            <option value="">all sources</option>
            {sources.map((name) => (
              <option key={name} value={name}>
                {name}
              </option>
            ))}
          </select>
        )}
      </section>
    </aside>
  );
}

const PAUSE_MS = 200; // pause in typing after which the search is sent

function SearchField({ value }: { value: string }) {
  const [text, setText] = useState(value);
  useEffect(() => setText(value), [value]);
  useEffect(() => {
    if (text === value) return;
    const timer = window.setTimeout(() => setQuery({ text }), PAUSE_MS);
    return () => window.clearTimeout(timer);
  }, [text]);
  return (
    <label class="search">
      <span>Search messages, errors, the judge's words</span>
      <input type="search" placeholder="text  /" value={text} onInput={(event) => setText(event.currentTarget.value)} />
    </label>
  );
}

function base(route: StepRoute): string {
  return `/api/source/${encodeURIComponent(route.source)}/step/${route.step}/${encodeURIComponent(route.split)}`;
}

// --- rows ---------------------------------------------------------------------------------------------------------------

interface GroupsProps {
  route: StepRoute;
  query: URLSearchParams;
  summary: StepSummary | undefined;
}

function Groups({ route, query, summary }: GroupsProps) {
  const [range, setRange] = useState<[number, number]>([0, 0]);
  const list = useRef<ListHandle>(null);
  const asked = new URLSearchParams([...query].filter(([name]) => ["sort", "order", "text", "min", "max", "errors", "source"].includes(name)));
  const pages = [...new Set([0, Math.floor(range[0] / PAGE), Math.floor(range[1] / PAGE)])];
  const urls = pages.map((page) => `${base(route)}/groups?${new URLSearchParams([...asked, ["offset", String(page * PAGE)], ["limit", String(PAGE)]])}`);
  const answers = useAnswers<GroupRows>(urls);
  const first = answers[0];
  const total = first?.value?.total ?? 0;
  const rowAt = (index: number): GroupRow | undefined => {
    const page = pages.indexOf(Math.floor(index / PAGE));
    return answers[page]?.value?.rows[index % PAGE];
  };
  const scale = scaleOf(answers.flatMap((answer) => answer.value?.rows.flatMap((row) => row.rewards) ?? []));
  const rows = useRoving(total, list, (index) => document.querySelector<HTMLElement>(`[data-row="${index}"] a`));
  const inRows = (by: number) => () => document.activeElement?.closest("[data-row]") != null && (rows.move(by), true);
  useKeys([
    { keys: ["j"], says: "next group", run: () => rows.move(1) },
    { keys: ["k"], says: "previous group", run: () => rows.move(-1) },
    { keys: ["ArrowDown"], says: "next group, from a group", run: inRows(1) },
    { keys: ["ArrowUp"], says: "previous group, from a group", run: inRows(-1) },
    { keys: ["Escape"], says: "clear the filters", run: () => setQuery({ text: null, min: null, max: null, errors: null, source: null }) },
  ]);
  useLayoutEffect(() => rows.enter(-1), [asked.toString(), route.step, route.split]);
  if (first?.value === undefined) return <Waiting error={first?.error ?? null} what="the groups" />;
  const isFiltered = ["text", "min", "errors", "source"].some((name) => query.has(name));
  return (
    <section class="groups" aria-label="Groups">
      <p class="soft small num" role="status">
        {isFiltered ? `${total.toLocaleString("en-US")} of ${count(summary?.num_groups ?? total, "group")}` : count(total, "group")}
        {first.error !== null && `; not up to date: ${first.error}`}
      </p>
      {total > 0 ? (
        <div role="table" aria-label="Groups of this step" aria-rowcount={total + 1}>
          <RowHead query={query} />
          <VirtualList
            role="rowgroup"
            count={total}
            estimate={ROW_HEIGHT}
            handle={list}
            onRange={(from, to) => setRange([from, to])}
            itemRole="row"
            itemProps={(index) => ({ "data-row": index, "aria-rowindex": index + 2, onFocusIn: () => rows.enter(index) })}
            item={(index) => <Row row={rowAt(index)} route={route} scale={scale} isCurrent={index === rows.here} />}
          />
        </div>
      ) : (
        <p class="waiting">{isFiltered ? "No group fits these filters. Escape clears them." : "No attempt has finished yet."}</p>
      )}
    </section>
  );
}

const COLUMNS: { name: string; sort: string | null; says: string }[] = [
  { name: "scenario", sort: "index", says: "in the order they were played" },
  { name: "rewards", sort: null, says: "" },
  { name: "mean", sort: "reward", says: "by mean reward" },
  { name: "spread", sort: "spread", says: "by spread of rewards" },
  { name: "failed", sort: "errors", says: "by failed attempts" },
  { name: "turns", sort: null, says: "" },
  { name: "tokens", sort: "length", says: "by sampled tokens" },
];

function RowHead({ query }: { query: URLSearchParams }) {
  const sort = query.get("sort") ?? "index";
  const isDescending = query.get("order") === "desc";
  const choose = (name: string) => {
    const isHere = name === sort;
    setQuery({ sort: name === "index" ? null : name, order: (isHere ? !isDescending : name !== "index") ? "desc" : null });
  };
  return (
    <div role="rowgroup" class="row-head">
      <div role="row" class="row" aria-rowindex={1}>
        {COLUMNS.map((column) => (
          <div key={column.name} role="columnheader" class={`cell-${column.name}`} aria-sort={column.sort === sort ? (isDescending ? "descending" : "ascending") : undefined}>
            {column.sort === null ? (
              column.name
            ) : (
              <button type="button" class="quiet" title={`Sort ${column.says}`} onClick={() => choose(column.sort ?? "index")}>
                {column.name}
                <span aria-hidden="true">{column.sort === sort ? (isDescending ? " \u2193" : " \u2191") : ""}</span>
              </button>
            )}
          </div>
        ))}
      </div>
    </div>
  );
}

interface RowProps {
  row: GroupRow | undefined;
  route: StepRoute;
  scale: Scale;
  isCurrent: boolean;
}

const MAX_CHIPS = 16;

function Row({ row, route, scale, isCurrent }: RowProps) {
  if (row === undefined) return <div class="row is-empty" />;
  return (
    <div class="row" data-current={isCurrent || undefined}>
      <div role="cell" class="cell-scenario">
        <a href={link.group(route.source, route.step, route.split, row.group_id)}>
          <Label text={row.label || row.scenario_id || row.group_id} max={200} />
        </a>
        <span class="soft small">
          <Label text={row.scenario_id || `${row.source ? `${row.source}/` : ""}${row.group_id}`} max={140} />
        </span>
      </div>
      <div role="cell" class="cell-rewards">
        {row.rewards.slice(0, MAX_CHIPS).map((value, place) => (
          <RewardChip key={place} value={value} scale={scale} href={link.trajectory(route.source, row.ids[place] ?? "")} label={`attempt ${place}`} hasFailed={row.num_errors > 0} isOutOfTab />
        ))}
        {row.rewards.length > MAX_CHIPS && <span class="soft small">+{(row.num_attempts ?? row.rewards.length) - MAX_CHIPS}</span>}
      </div>
      <div role="cell" class="cell-mean num">{decimal(row.mean)}</div>
      <div role="cell" class="cell-spread num">{decimal(row.spread)}</div>
      <div role="cell" class="cell-failed num" title={row.error ?? undefined}>
        {row.num_errors > 0 ? (
          <span class="failed">
            {row.num_errors}
            {row.error !== null && (
              <span class="small">
                {" "}
                <Label text={row.error} max={24} />
              </span>
            )}
          </span>
        ) : (
          <span class="faint">{"\u2013"}</span>
        )}
      </div>
      <div role="cell" class="cell-turns num">{average(row.num_turns)}</div>
      <div role="cell" class="cell-tokens num">{average(row.num_tokens)}</div>
    </div>
  );
}
