// Two attempts of one group side by side, without their scores: a person says with one key which is better.

import { useEffect, useRef, useState } from "preact/hooks";
import type { TrajectoryAnswer } from "./contract";
import { post, useAnswer } from "./data";
import { useKeys } from "./keys";
import { Calls, roleClass } from "./message";
import { go, link, type Route } from "./route";
import { Heading, Waiting } from "./shell";
import { contentText, Label, LongText } from "./text";

/** What the server answers: the next pair, and the report in words. */
interface Labelling {
  pair: { group_id: string; left: string; right: string } | null;
  lines: string[];
}

const LABEL_S = 60; // longest wait for the server to keep an answer
const ANSWERS: [verdict: string, says: string, ...keys: string[]][] = [
  ["left", "left is better", "1", "ArrowLeft"],
  ["equal", "equal", "0", "="],
  ["right", "right is better", "2", "ArrowRight"],
  ["skip", "skip", "s"],
  ["undo", "undo", "u"],
];

export function LabelView({ route }: { route: Extract<Route, { page: "label" }> }) {
  const url = `/api/source/${encodeURIComponent(route.source)}/step/${route.step}/${encodeURIComponent(route.split)}/label`;
  const first = useAnswer<Labelling>(url);
  const [newest, setNewest] = useState<Labelling | null>(null);
  const [error, setError] = useState<string | null>(null);
  const isWaiting = useRef(false);
  const now = newest ?? first.value;
  const pair = now?.pair ?? { group_id: "", left: "", right: "" };
  const answer = async (verdict: string) => {
    if (isWaiting.current || now === undefined) return;
    isWaiting.current = true;
    await post<Labelling>(url, { verdict, ...pair }, LABEL_S).then((found) => (setNewest(found), setError(null)), (failure: Error) => setError(failure.message));
    isWaiting.current = false;
  };
  useKeys([
    ...ANSWERS.map(([verdict, says, ...keys]) => ({ keys, says, run: () => void answer(verdict) })),
    { keys: ["q", "Escape"], says: "up to the step", run: () => go(link.step(route.source, route.step, route.split)) },
  ]);
  useEffect(() => window.scrollTo(0, 0), [pair.left, pair.right]);
  if (now === undefined) return <Waiting error={first.error} what="the pairs" />;
  return (
    <div class="page">
      <div class="head">
        <Heading title="Which is better?">{now.pair === null ? "Every pair has its answer" : "Which is better?"}</Heading>
        <div class="facts" role="status">{now.lines.map((line) => <span key={line}>{line}</span>)}</div>
        <div class="tools" role="group" aria-label="Answers">
          {ANSWERS.map(([verdict, says, key]) => (
            <button key={verdict} type="button" onClick={() => void answer(verdict)}>{says} <kbd>{key}</kbd></button>
          ))}
        </div>
        {error !== null && <p class="failed"><Label text={error} max={500} /></p>}
      </div>
      <div class="halves">
        {now.pair !== null && [pair.left, pair.right].map((id, side) => <Attempt key={id} name={side ? "right" : "left"} source={route.source} id={id} />)}
      </div>
    </div>
  );
}

function Attempt({ name, source, id }: { name: string; source: string; id: string }) {
  const { value, error } = useAnswer<TrajectoryAnswer>(`/api/source/${encodeURIComponent(source)}/trajectory/${encodeURIComponent(id)}`);
  if (value === undefined) return <Waiting error={error} what="the attempt" />;
  return (
    <section class="panel" aria-label={`The attempt on the ${name}`}>
      <h2>{name}</h2>
      {[...value.trajectory.branches, value.trajectory.messages].flat().map((message, place) => (
        <div key={place} class={`message ${roleClass(String(message?.role))}`}>
          <span class="role"><Label text={String(message?.role)} max={40} /></span>
          <div class="message-body">
            {[message?.reasoning_content ?? message?.reasoning, message?.content].map(contentText).map((text, part) => text !== "" && <LongText key={part} text={text} fold={3000} />)}
            <Calls calls={message?.tool_calls ?? []} />
          </div>
        </div>
      ))}
    </section>
  );
}
