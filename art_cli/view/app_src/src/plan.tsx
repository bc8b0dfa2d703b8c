// What `art plan` found before a run, and what the run then took, as `art plan` and `art report` print them.

import type { Plan, Source, SourceDetails, Sources } from "./contract";
import { useAnswers } from "./data";
import { number, seconds } from "./numbers";
import { Heading, Waiting } from "./shell";
import { Label } from "./text";

export function PlanView({ sources }: { sources: Sources }) {
  const planned = sources.sources.filter((source) => source.has_plan);
  const answers = useAnswers<SourceDetails>(planned.map((source) => `/api/source/${encodeURIComponent(source.id)}`));
  if (planned.length > 0 && answers.every((answer) => answer.value === undefined)) return <Waiting error={answers[0]?.error ?? null} what="the plan" />;
  return (
    <div class="page">
      <div class="head">
        <Heading title="Plan">Plan</Heading>
        <p class="soft">What the first step showed of the rest: whether the reward can be learned, with which settings, and what the run takes.</p>
      </div>
      {planned.length === 0 && <p class="waiting">No run here was planned. `art plan` asks before a run.</p>}
      {planned.map((source, place) => (
        <OnePlan key={source.id} source={source} details={answers[place]?.value} />
      ))}
    </div>
  );
}

function OnePlan({ source, details }: { source: Source; details: SourceDetails | undefined }) {
  const plan = details?.plan;
  return (
    <section aria-label={`Plan of ${source.name}`}>
      <h2>
        <Label text={source.name} />
      </h2>
      {!plan && details?.problems?.map((problem) => <p key={problem} class="failed"><Label text={problem} max={500} /></p>)}
      <div class="halves">
        {plan?.sections.map(([question, rows]) => (
          <section key={question} class="panel" aria-label={question}>
            <h3>
              <Label text={question} max={200} />
            </h3>
            <div class="scroll-x" role="region" aria-label={question} tabIndex={0}>
              <table class="report">
                <tbody>
                  {rows.map(([name, text], place) => (
                    <tr key={place}>
                      <th scope="row" class={name.startsWith("!") ? "failed" : undefined} colSpan={text === "" ? 2 : 1}>
                        <Label text={name} max={100} />
                      </th>
                      {text !== "" && <td>{name === "pilots" && plan.pilots.length > 0 ? <Pilots pilots={plan.pilots} /> : <Label text={text} max={800} />}</td>}
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          </section>
        ))}
        {plan && <Expected rows={plan.expected} />}
      </div>
    </section>
  );
}

/** The steps that were taken and taken back: how far each rate moves the policy. */
function Pilots({ pilots }: { pilots: Plan["pilots"] }) {
  const most = Math.max(...pilots.map((pilot) => pilot.kl ?? 0)) || 1;
  return (
    <table class="pilots">
      <thead>
        <tr>
          <th scope="col" class="num">learning rate</th>
          <th scope="col" class="num">nats per token</th>
          <th scope="col" class="num">took</th>
        </tr>
      </thead>
      <tbody>
        {pilots.map((pilot, place) => (
          <tr key={place}>
            <td class="num">{number(pilot.rate)}</td>
            <td class="num">
              <meter value={pilot.kl ?? 0} max={most} aria-label={`moved ${number(pilot.kl)} nats`} /> {number(pilot.kl)}
            </td>
            <td class="num">{seconds(pilot.seconds)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Expected({ rows: [head = [], ...rows] }: { rows: string[][] }) {
  const title = head.includes("happened") ? "what it promised, and what happened" : "what the run takes";
  return (
    <section class="panel" aria-label={title}>
      <h3>{title}</h3>
      <div class="scroll-x" role="region" aria-label={title} tabIndex={0}>
        <table class="promised">
          <thead>
            <tr>
              {head.map((name, place) => (
                <th key={place} scope="col" class={place > 0 ? "num" : undefined}>
                  {name || (place === 0 ? "part" : "interval held")}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map(([name = "", ...cells]) => (
              <tr key={name}>
                <th scope="row">
                  <Label text={name} max={60} />
                </th>
                {cells.map((cell, place) => (
                  <td key={place} class="num">
                    <Label text={cell} max={60} />
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
