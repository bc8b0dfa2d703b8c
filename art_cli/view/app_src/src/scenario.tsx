// The same scenario across steps: its rewards, and two of its attempts as a diff.

import { diffWordsWithSpace, type ChangeObject } from "diff";
import { useMemo, useState } from "preact/hooks";
import type { ScenarioAttempt, Sources } from "./contract";
import { Lines } from "./chart";
import { useAnswer } from "./data";
import { useKeys } from "./keys";
import { count, reward as rewardText } from "./numbers";
import { RewardChip, scaleOf } from "./rewards";
import { link, setQuery, type Route } from "./route";
import { Heading, Notice, Waiting } from "./shell";
import { Label, visible } from "./text";

type ScenarioRoute = Extract<Route, { page: "scenario" }>;

const MAX_DIFFED = 40_000; // characters of a reply that are compared
const DIFF_MS = 1500; // longest time that a comparison may take

interface ViewProps {
  sources: Sources;
  route: ScenarioRoute;
  query: URLSearchParams;
}

export function ScenarioView({ route, query }: ViewProps) {
  const { value, error } = useAnswer<{ attempts: ScenarioAttempt[]; num_attempts: number }>(`/api/source/${encodeURIComponent(route.source)}/scenario/${encodeURIComponent(route.id)}`);
  if (value === undefined) return <Waiting error={error} what="the attempts" />;
  if (value.attempts.length === 0) return <Notice title="No attempt at this scenario">It was not played in this run.</Notice>;
  return <Compared attempts={value.attempts} total={value.num_attempts} route={route} query={query} />;
}

function Compared({ attempts, total, route, query }: { attempts: ScenarioAttempt[]; total: number; route: ScenarioRoute; query: URLSearchParams }) {
  const after = Math.max(0, placeOf(attempts, query.get("b")) ?? bestOf(attempts, attempts.at(-1)));
  const before = placeOf(attempts, query.get("a")) ?? otherThan(after, bestOf(attempts, attempts[0]), attempts.length);
  const [a, b] = [attempts[before] as ScenarioAttempt, attempts[after] as ScenarioAttempt];
  const move = (by: number) => {
    const next = attempts[after + by];
    if (next) setQuery({ a: a.id, b: next.id });
  };
  useKeys([
    { keys: ["j", "ArrowRight"], says: "compare with the next attempt", run: () => move(1) },
    { keys: ["k", "ArrowLeft"], says: "compare with the previous attempt", run: () => move(-1) },
    { keys: ["Escape"], says: "back", run: () => history.back() },
  ]);
  const scale = scaleOf(attempts.map((attempt) => attempt.reward));
  const steps = [...new Set(attempts.map((attempt) => attempt.step))];
  const lines = useMemo(() => [{ name: "mean reward", points: meanBySteps(attempts), tone: "--series-1", hasDots: true }], [attempts]);
  const choose = (step: number) => {
    const place = attempts.findIndex((attempt) => attempt.step === step);
    const found = attempts[place];
    if (found) setQuery({ a: a.id, b: found.id });
  };
  return (
    <div class="page">
      <div class="head">
        <Heading title={`Scenario ${route.id}`}>
          Scenario <Label text={route.id} max={100} />
        </Heading>
        <p class="facts">
          <span>{count(total, "attempt")}</span>
          <span>{count(steps.length, "step")}</span>
          {attempts.length < total && <span>{attempts.length} of them shown, as many of every step</span>}
        </p>
      </div>
      {steps.length > 1 && (
        <section class="panel" aria-labelledby="by-step">
          <div class="panel-head">
            <h2 id="by-step">Mean reward by step</h2>
          </div>
          <Lines lines={lines} height={120} label="Mean reward of this scenario by step" covers={[0, 1]} at={b.step} onStep={choose} />
        </section>
      )}
      <div class="diff-heads">
        <Chooser label="Before" attempts={attempts} chosen={a} scale={scale} onChoose={(id) => setQuery({ a: id, b: b.id })} source={route.source} />
        <Chooser label="After" attempts={attempts} chosen={b} scale={scale} onChoose={(id) => setQuery({ a: a.id, b: id })} source={route.source} />
      </div>
      <Diff before={a.reply} after={b.reply} />
    </div>
  );
}

function placeOf(attempts: ScenarioAttempt[], id: string | null): number | null {
  const place = attempts.findIndex((attempt) => attempt.id === id);
  return place < 0 ? null : place;
}

/** The place of the attempt with the highest reward in the step of `like`. */
function bestOf(attempts: ScenarioAttempt[], like: ScenarioAttempt | undefined): number {
  let best = attempts.findIndex((attempt) => attempt.step === like?.step && attempt.split === like?.split);
  for (const [place, attempt] of attempts.entries()) {
    const isThere = attempt.step === like?.step && attempt.split === like?.split;
    if (isThere && (attempt.reward ?? -Infinity) > (attempts[best]?.reward ?? -Infinity)) best = place;
  }
  return best;
}

function otherThan(place: number, wanted: number, total: number): number {
  return wanted !== place || total < 2 ? wanted : place === 0 ? 1 : 0;
}

function meanBySteps(attempts: ScenarioAttempt[]): [number, number | null][] {
  const steps = new Map<number, number[]>();
  for (const { step, reward } of attempts) if (reward !== null) steps.set(step, [...(steps.get(step) ?? []), reward]);
  return [...steps].map(([step, rewards]) => [step, rewards.reduce((sum, value) => sum + value, 0) / rewards.length]);
}

interface ChooserProps {
  label: string;
  attempts: ScenarioAttempt[];
  chosen: ScenarioAttempt;
  scale: { low: number; high: number };
  source: string;
  onChoose: (id: string) => void;
}

function Chooser({ label, attempts, chosen, scale, source, onChoose }: ChooserProps) {
  return (
    <div class="chooser">
      <span class="soft">{label}</span>
      <RewardChip value={chosen.reward} scale={scale} label={label} />
      <select aria-label={`${label}: attempt`} value={chosen.id} onChange={(event) => onChoose(event.currentTarget.value)}>
        {attempts.map((attempt) => (
          <option key={attempt.id} value={attempt.id}>
            step {attempt.step}, {attempt.split}: reward {rewardText(attempt.reward)} ({attempt.id.slice(0, 60)})
          </option>
        ))}
      </select>
      <a href={link.trajectory(source, chosen.id)}>open</a>
    </div>
  );
}

// --- the diff -----------------------------------------------------------------------------------------------------------

function Diff({ before, after }: { before: string; after: string }) {
  const [isInline, setInline] = useState(false);
  const isCut = before.length > MAX_DIFFED || after.length > MAX_DIFFED;
  const parts = useMemo(() => compared(before.slice(0, MAX_DIFFED), after.slice(0, MAX_DIFFED)), [before, after]);
  if (before === after) return <Replies left={visible(before.slice(0, MAX_DIFFED))} note="Both attempts read the same." />;
  return (
    <section class="diff" aria-label="Difference of the two attempts">
      <div class="panel-head">
        <h2>What changed</h2>
        <div class="segmented" role="group" aria-label="Layout">
          <button type="button" aria-pressed={!isInline} onClick={() => setInline(false)}>
            side by side
          </button>
          <button type="button" aria-pressed={isInline} onClick={() => setInline(true)}>
            in one text
          </button>
        </div>
        {isCut && <span class="soft small">The first {MAX_DIFFED.toLocaleString("en-US")} characters are compared.</span>}
      </div>
      {parts === null ? (
        <div class="diff-columns">
          <div class="text panel">{visible(before.slice(0, MAX_DIFFED))}</div>
          <div class="text panel">{visible(after.slice(0, MAX_DIFFED))}</div>
        </div>
      ) : isInline ? (
        <div class="text panel" dir="auto">
          {parts.map(changed)}
        </div>
      ) : (
        <div class="diff-columns">
          <div class="text panel" dir="auto" aria-label="Before">
            {parts.filter((part) => !part.added).map(changed)}
          </div>
          <div class="text panel" dir="auto" aria-label="After">
            {parts.filter((part) => !part.removed).map(changed)}
          </div>
        </div>
      )}
    </section>
  );
}

function Replies({ left, note }: { left: preact.ComponentChildren; note: string }) {
  return (
    <section class="diff">
      <p class="soft">{note}</p>
      <div class="text panel" dir="auto">
        {left}
      </div>
    </section>
  );
}

/** The changes word by word; null: the texts differ too much to compare them in time. */
function compared(before: string, after: string): ChangeObject<string>[] | null {
  return diffWordsWithSpace(before, after, { timeout: DIFF_MS }) ?? null;
}

function changed(part: ChangeObject<string>, place: number) {
  const body = visible(part.value);
  if (part.added) return <ins key={place}>{body}</ins>;
  if (part.removed) return <del key={place}>{body}</del>;
  return <span key={place}>{body}</span>;
}
