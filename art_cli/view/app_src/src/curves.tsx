// The curves of one or several runs: reward with its interval, seconds and tokens, every metric.

import { useMemo, useRef, useState } from "preact/hooks";
import type { Finding, Source, SourceDetails, Sources } from "./contract";
import { Lines, type Line } from "./chart";
import { useAnswers } from "./data";
import { useKeys } from "./keys";
import { useChoice } from "./memory";
import { count, number, seconds } from "./numbers";
import { go, link } from "./route";
import { Heading, Notice, Waiting } from "./shell";
import { Label } from "./text";
import { Lazy } from "./lazy";

const TONES = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];
const DASHES: (number[] | undefined)[] = [undefined, [8, 4], [2, 3], [10, 3, 2, 3]];
const SHADOW = /^shadow\/[^.]+$/; // what a shadow judge scores, which is never trained on

// What the chart of rewards has; the raw training reward only where it stands alone, because it is noisy.
const REWARDS: (Pick<Line, "tone" | "hasDots" | "isFaint" | "isThin"> & { split: string; metric: string; says: string })[] = [
  { split: "train", metric: "reward_mean", says: "training", tone: "--series-1", isFaint: true },
  { split: "train", metric: "reward_smoothed", says: "training, smoothed", tone: "--series-1", isThin: true },
  { split: "eval", metric: "reward", says: "evaluation", tone: "--series-2", hasDots: true },
];

const MAX_SHOWN = 20; // runs that are plotted at first

export interface Shown {
  source: Source;
  details: SourceDetails;
  tone: string;
  dash: number[] | undefined;
}

export function CurvesView({ sources }: { sources: Sources }) {
  const answers = useAnswers<SourceDetails>(sources.sources.map((source) => `/api/source/${encodeURIComponent(source.id)}`));
  const [hidden, setHidden] = useState(() => sources.sources.slice(MAX_SHOWN).map((source) => source.id));
  const [hovered, setHovered] = useState<number | null>(null);
  const all: Shown[] = [];
  for (const [place, source] of sources.sources.entries()) {
    const details = answers[place]?.value;
    if (details) all.push({ source, details, tone: TONES[place % TONES.length] ?? "--series-1", dash: DASHES[Math.floor(place / TONES.length) % DASHES.length] });
  }
  const error = answers.find((answer) => answer.error !== null)?.error ?? null;
  const title = sources.sources.length === 1 ? (sources.sources[0]?.name ?? "") : count(sources.sources.length, "run");
  const runs = useMemo(() => all.filter((run) => !hidden.includes(run.source.id)), [all.map((run) => run.details).concat(), hidden.join()]);
  if (sources.sources.length === 0) return <Notice title="Nothing here yet">No trajectories and no metrics were found.</Notice>;
  if (all.length === 0) return <Waiting error={error} what="the curves" />;
  return (
    <div class="page">
      <div class="head">
        <Heading title={title}>
          <Label text={title} />
        </Heading>
        {all.length === 1 && all[0] && <Facts run={all[0]} />}
      </div>
      {all.length > 1 && <Runs all={all} hidden={hidden} onHide={setHidden} />}
      {runs.flatMap((run) => (run.details.problems ?? []).map((problem) => <p key={problem} class="failed"><Label text={problem} max={500} /></p>))}
      {runs.map((run) => (
        <Findings key={run.source.id} run={run} isNamed={all.length > 1} />
      ))}
      <Reward runs={runs} hovered={hovered} onHover={setHovered} />
      <div class="halves is-charts">
        <Stages runs={runs} hovered={hovered} onHover={setHovered} />
        <Tokens runs={runs} hovered={hovered} onHover={setHovered} />
      </div>
      <Metrics runs={runs} hovered={hovered} onHover={setHovered} />
    </div>
  );
}

function Facts({ run }: { run: Shown }) {
  const { source, details } = run;
  const steps = new Set(source.steps.filter((each) => each.split === "train").map((each) => each.step)).size;
  const best = details.best_step;
  return (
    <p class="facts">
      <Label text={source.path} />
      <span>{count(steps, "step")}</span>
      <span>{count(source.num_trajectories, "trajectory", "trajectories")}</span>
      {best !== null && <span>best checkpoint: step {best}</span>}
      {details.checkpoints.length > 0 && <span>{count(details.checkpoints.length, "checkpoint")} kept</span>}
    </p>
  );
}

function Runs({ all, hidden, onHide }: { all: Shown[]; hidden: string[]; onHide: (ids: string[]) => void }) {
  const turn = (id: string) => onHide(hidden.includes(id) ? hidden.filter((each) => each !== id) : [...hidden, id]);
  return (
    <div class="scroll-x" role="region" aria-label="Runs" tabIndex={0}>
      <table class="runs">
        <thead>
          <tr>
            <th scope="col">run</th>
            <th scope="col" class="num">steps</th>
            <th scope="col" class="num">training reward</th>
            <th scope="col" class="num">last evaluation</th>
            <th scope="col" class="num">best step</th>
          </tr>
        </thead>
        <tbody>
          {all.map((run) => {
            const evaluated = run.details.evaluations.filter((each) => each.metric === "reward").at(-1);
            return (
              <tr key={run.source.id}>
                <th scope="row">
                  <label>
                    <input type="checkbox" checked={!hidden.includes(run.source.id)} onChange={() => turn(run.source.id)} />
                    <Swatch tone={run.tone} dash={run.dash} />
                    <Label text={run.source.name} />
                  </label>
                </th>
                <td class="num">{Math.max(0, ...run.source.steps.map((each) => each.step))}</td>
                <td class="num">{number(run.details.metrics.train?.reward_mean?.at(-1)?.[1])}</td>
                <td class="num">{evaluated ? interval(evaluated.mean, evaluated.low, evaluated.high) : "\u2013"}</td>
                <td class="num">{run.details.best_step ?? "\u2013"}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

function interval(mean: number | null, low: number | null, high: number | null): string {
  return low === null || high === null ? number(mean) : `${number(mean)} [${number(low)}, ${number(high)}]`;
}

function Swatch({ tone, dash, isFaint }: { tone: string; dash?: number[] | undefined; isFaint?: boolean }) {
  return (
    <svg class="swatch" width="22" height="8" aria-hidden="true">
      <line x1="0" y1="4" x2="22" y2="4" stroke={`var(${tone})`} stroke-width="2.5" stroke-opacity={isFaint ? 0.45 : 1} stroke-dasharray={dash?.join(" ")} />
    </svg>
  );
}

function Findings({ run, isNamed }: { run: Shown; isNamed: boolean }) {
  if (run.details.findings.length === 0) return null;
  return (
    <section class="findings" aria-label={`What went wrong${isNamed ? ` in ${run.source.name}` : ""}`}>
      {run.details.findings.map((finding, place) => (
        <details key={place}>
          <summary>
            {isNamed && <Label text={run.source.name} />} <b>{finding.title}</b>{" "}
            <Label text={finding.text} max={500} />
          </summary>
          <ul>
            <li>
              <a href={link.step(run.source.id, finding.at.step, finding.at.split)}>groups of step {finding.at.step}</a>
            </li>
            {reasons(finding).map((line, index) => (
              <li key={index}>
                <Label text={line} max={800} />
              </li>
            ))}
          </ul>
        </details>
      ))}
    </section>
  );
}

function reasons(finding: Finding): string[] {
  return [...finding.reasons.map((reason) => `beside it: ${reason.text}`), ...finding.cures.map((cure) => `try: ${cure}`)];
}

// --- reward -------------------------------------------------------------------------------------------------------------

interface ChartProps {
  runs: Shown[];
  hovered: number | null;
  onHover: (step: number | null) => void;
}

function Reward({ runs, hovered, onHover }: ChartProps) {
  const lines = useMemo(() => runs.flatMap(rewardLines), [runs]);
  const open = (step: number) => openStep(runs, step);
  if (lines.length === 0) return <p class="waiting">No reward has been measured yet. The first step fills this chart.</p>;
  return (
    <section class="panel" aria-labelledby="reward-title">
      <div class="panel-head">
        <h2 id="reward-title">Reward</h2>
        <Legend lines={lines} at={hovered} />
      </div>
      <Lines lines={lines} height={280} label="Reward by step" covers={[0]} onStep={open} onHover={onHover} />
      <Evaluations runs={runs} />
    </section>
  );
}

function rewardLines({ source, details, tone, dash }: Shown, _: number, all: Shown[]): Line[] {
  const isAlone = all.length === 1;
  const lines: Line[] = [];
  for (const { split, metric, says, ...looks } of REWARDS) {
    const points = details.metrics[split]?.[metric];
    const band = details.intervals[split]?.[metric];
    if (!points?.length || (looks.isFaint && !isAlone)) continue;
    lines.push({
      ...looks,
      name: `${isAlone ? "" : `${source.name}, `}${says}${details.reward_names && details.reward_names[split] !== "reward" ? `: ${details.reward_names[split]}` : ""}`,
      points,
      tone: isAlone ? looks.tone : tone,
      ...(dash && { dash }),
      ...(band?.length && (isAlone || looks.hasDots) && { band }),
    });
  }
  const shadows = Object.keys(details.metrics.train ?? {}).filter((name) => SHADOW.test(name));
  for (const [place, name] of shadows.entries()) {
    const points = details.metrics.train?.[name] ?? [];
    lines.push({ name: isAlone ? name : `${source.name}, ${name}`, points, tone: isAlone ? (TONES[2 + (place % 4)] ?? tone) : tone, dash: [3, 3] });
  }
  return lines;
}

function Legend({ lines, at, format = number }: { lines: Line[]; at: number | null; format?: (value: number | null) => string }) {
  return (
    <ul class="legend">
      {lines.map((line) => (
        <li key={line.name}>
          <Swatch tone={line.tone} dash={line.dash} {...(line.isFaint && { isFaint: true })} />
          <Label text={line.name} max={60} />
          <b class="num">{format(valueAt(line, at))}</b>
        </li>
      ))}
      <li class="soft num at-step">{at === null ? "last" : `step ${at}`}</li>
    </ul>
  );
}

/** The value at a step, or the newest before it; without a step the last. */
function valueAt(line: Line, step: number | null): number | null {
  return line.points.findLast(([x, y]) => y !== null && (step === null || x <= step))?.[1] ?? null;
}

/** Opens the groups of the step nearest to where the chart was clicked. */
function openStep(runs: Shown[], step: number): void {
  for (const { source } of runs) {
    const near = source.steps.toSorted((a, b) => Math.abs(a.step - step) - Math.abs(b.step - step) || (a.split === "train" ? -1 : 1));
    if (near[0]) return go(link.step(source.id, near[0].step, near[0].split));
  }
}

function Evaluations({ runs }: { runs: Shown[] }) {
  const rows = runs.flatMap((run) => run.details.evaluations.filter((each) => each.metric === "reward").map((each) => ({ run, each })));
  if (rows.length === 0) return null;
  return (
    <details class="numbers">
      <summary>Evaluations as numbers</summary>
      <table>
        <thead>
          <tr>
            {runs.length > 1 && <th scope="col">run</th>}
            <th scope="col" class="num">step</th>
            <th scope="col" class="num">{[...new Set(rows.map(({ run }) => run.details.reward_names?.eval ?? "reward"))].join(" or ")}</th>
            <th scope="col" class="num">95 % interval</th>
            <th scope="col" class="num">scenarios</th>
          </tr>
        </thead>
        <tbody>
          {rows.map(({ run, each }) => (
            <tr key={`${run.source.id} ${each.step}`}>
              {runs.length > 1 && (
                <td>
                  <Label text={run.source.name} />
                </td>
              )}
              <td class="num">
                <a href={link.step(run.source.id, each.step, "eval")}>{each.step}</a>
              </td>
              <td class="num">{number(each.mean)}</td>
              <td class="num">{each.low === null ? "\u2013" : `${number(each.low)} to ${number(each.high)}`}</td>
              <td class="num">{each.n}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </details>
  );
}

// --- time and tokens ----------------------------------------------------------------------------------------------------

function Stages({ runs, hovered, onHover }: ChartProps) {
  const [chosen, setChosen] = useState<string | null>(null);
  const run = runs.find((each) => each.source.id === chosen) ?? runs[0];
  const lines = useMemo<Line[]>(() => {
    const stages = Object.entries(run?.details.stages ?? {}).filter(([, points]) => points.some(([, y]) => (y ?? 0) > 0));
    return stages.map(([name, points], place) => ({ name: name.replace(/_s$/, ""), points, tone: TONES[place % TONES.length] ?? "--series-1" }));
  }, [run]);
  if (run === undefined || lines.length === 0) return null;
  return (
    <section class="panel" aria-labelledby="stages-title">
      <div class="panel-head">
        <h2 id="stages-title">Seconds per step</h2>
        {runs.length > 1 && <Choose runs={runs} run={run} onChoose={setChosen} label="Run whose seconds are shown" />}
        <Legend lines={lines} at={hovered} format={seconds} />
      </div>
      <Lines lines={lines} height={180} label="Seconds per step, by stage" covers={[0]} isStacked onHover={onHover} />
    </section>
  );
}

function Choose({ runs, run, onChoose, label }: { runs: Shown[]; run: Shown; onChoose: (id: string) => void; label: string }) {
  return (
    <select aria-label={label} value={run.source.id} onChange={(event) => onChoose(event.currentTarget.value)}>
      {runs.map((each) => (
        <option key={each.source.id} value={each.source.id}>
          {each.source.name}
        </option>
      ))}
    </select>
  );
}

function Tokens({ runs, hovered, onHover }: ChartProps) {
  const lines = useMemo<Line[]>(() => {
    const names = ["tokens_sampled", "tokens_trained", "tokens_computed"];
    return runs.flatMap(({ source, details, tone, dash }) =>
      names.flatMap((name, place) => {
        const points = details.metrics.train?.[name];
        if (!points?.length || (runs.length > 1 && place > 0)) return [];
        const label = name.replace("tokens_", "");
        const line: Line = { name: runs.length > 1 ? `${source.name}, ${label}` : label, points, tone: runs.length > 1 ? tone : (TONES[place] ?? tone) };
        return [dash ? { ...line, dash } : line];
      }),
    );
  }, [runs]);
  if (lines.length === 0) return null;
  return (
    <section class="panel" aria-labelledby="tokens-title">
      <div class="panel-head">
        <h2 id="tokens-title">Tokens per step</h2>
        <Legend lines={lines} at={hovered} />
      </div>
      <Lines lines={lines} height={180} label="Tokens per step" covers={[0]} onHover={onHover} />
    </section>
  );
}

// --- every metric -------------------------------------------------------------------------------------------------------

function Metrics({ runs, hovered, onHover }: ChartProps) {
  const [find, setFind] = useState("");
  const [pinned, setPinned] = useChoice<string[]>("pinned metrics", []);
  const grid = useRef<HTMLDivElement>(null);
  const names = useMemo(() => metricNames(runs), [runs]);
  const words = find.toLowerCase().split(/\s+/).filter(Boolean);
  const found = names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
  const sorted = [...found.filter((name) => pinned.includes(name)), ...found.filter((name) => !pinned.includes(name))];
  useKeys([
    { keys: ["j"], says: "next metric", run: () => moveFocus(grid.current, 1) },
    { keys: ["k"], says: "previous metric", run: () => moveFocus(grid.current, -1) },
  ]);
  if (names.length === 0) return null;
  const pin = (name: string) => setPinned(pinned.includes(name) ? pinned.filter((each) => each !== name) : [...pinned, name]);
  return (
    <section aria-labelledby="metrics-title">
      <div class="section-head">
        <h2 id="metrics-title">Every metric</h2>
        <label class="search">
          <span class="unseen">Search metrics</span>
          <input type="search" placeholder="Search metrics  /" value={find} onInput={(event) => setFind(event.currentTarget.value)} />
        </label>
        <span class="soft num" role="status">
          {found.length === names.length ? names.length : `${found.length} of ${names.length}`}
        </span>
      </div>
      <div class="metrics" ref={grid}>
        {sorted.map((name) => (
          <Metric key={name} name={name} runs={runs} hovered={hovered} onHover={onHover} isPinned={pinned.includes(name)} onPin={() => pin(name)} />
        ))}
      </div>
    </section>
  );
}

function metricNames(runs: Shown[]): string[] {
  const names = new Set<string>();
  for (const { details } of runs) {
    for (const [split, metrics] of Object.entries(details.metrics)) {
      for (const [name, points] of Object.entries(metrics)) if (points.length > 0) names.add(`${split}/${name}`);
    }
  }
  const order = ["train", "eval", "sft"];
  const place = (name: string) => (order.indexOf(name.split("/", 1)[0] ?? "") + 4) % 4;
  return [...names].sort((a, b) => place(a) - place(b) || a.localeCompare(b));
}

interface MetricProps extends ChartProps {
  name: string;
  isPinned: boolean;
  onPin: () => void;
}

function Metric({ name, runs, hovered, onHover, isPinned, onPin }: MetricProps) {
  const at = name.indexOf("/");
  const [split, metric] = [name.slice(0, at), name.slice(at + 1)];
  const lines = useMemo<Line[]>(
    () =>
      runs.flatMap(({ source, details, tone, dash }) => {
        const points = details.metrics[split]?.[metric];
        const band = details.intervals[split]?.[metric];
        return points ? [{ name: source.name, points, tone, hasDots: split !== "train", ...(dash && { dash }), ...(band && { band }) }] : [];
      }),
    [runs, name],
  );
  return (
    <article class="metric" tabIndex={-1} aria-label={name}>
      <div class="metric-head">
        <h3 title={name}>
          <span class="soft">{split}/</span>
          <Label text={metric} />
        </h3>
        <span class="values num">
          {lines.slice(0, 4).map((line) => (
            <span key={line.name} style={lines.length > 1 ? { color: `var(${line.tone})` } : {}}>
              {number(valueAt(line, hovered))}
            </span>
          ))}
        </span>
        <button type="button" class="quiet pin" aria-pressed={isPinned} aria-label={`Pin ${name}`} title={isPinned ? "Pinned: shown first" : "Pin: show first"} onClick={onPin}>
          {isPinned ? "\u2605" : "\u2606"}
        </button>
      </div>
      <Lazy height={110}>
        <Lines lines={lines} height={110} label={name} onHover={onHover} onStep={(step) => openStep(runs, step)} />
      </Lazy>
    </article>
  );
}

/** Moves the focus to the next or previous child. */
export function moveFocus(list: HTMLElement | null, by: number): void {
  const items = [...(list?.children ?? [])] as HTMLElement[];
  const here = items.findIndex((item) => item.contains(document.activeElement));
  const next = items[here < 0 ? (by > 0 ? 0 : items.length - 1) : Math.min(items.length - 1, Math.max(0, here + by))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

