// What a step's scored file says of its judge: how far a score can be trusted. As `art judge --report` prints it.

import { useState } from "preact/hooks";
import type { JudgeReport, Source, SourceDetails, Sources } from "./contract";
import { useAnswer, useAnswers } from "./data";
import { link } from "./route";
import { Heading, Waiting } from "./shell";
import { Label } from "./text";

export function JudgeView({ sources }: { sources: Sources }) {
  const answers = useAnswers<SourceDetails>(sources.sources.map((source) => `/api/source/${encodeURIComponent(source.id)}`));
  if (answers.every((answer) => answer.value === undefined)) return <Waiting error={answers[0]?.error ?? null} what="the judge's report" />;
  const judged = sources.sources.flatMap((source, place) => {
    const steps = answers[place]?.value?.judge?.steps ?? [];
    return steps.length > 0 ? [{ source, steps }] : [];
  });
  return (
    <div class="page">
      <div class="head">
        <Heading title="Judge">Judge</Heading>
        <p class="soft">How far the rewards of a step can be trusted: what its scores say of the judge that gave them.</p>
      </div>
      {judged.length === 0 && <p class="waiting">There is no scored file here, so there is nothing to say of a judge.</p>}
      <div class="halves">
        {judged.map(({ source, steps }) => (
          <Report key={source.id} source={source} steps={steps} />
        ))}
      </div>
    </div>
  );
}

function Report({ source, steps }: { source: Source; steps: number[] }) {
  const [chosen, setChosen] = useState<number | null>(null);
  const step = chosen ?? steps.at(-1) ?? 0;
  const { value, error } = useAnswer<JudgeReport>(`/api/source/${encodeURIComponent(source.id)}/judge/${step}`);
  return (
    <section class="panel" aria-label={`Judge of ${source.name}`}>
      <div class="panel-head">
        <h2>
          <Label text={source.name} />
        </h2>
        {steps.length > 1 && (
          <select aria-label="Step" value={String(step)} onChange={(event) => setChosen(Number(event.currentTarget.value))}>
            {steps.map((each) => (
              <option key={each} value={each}>
                step {each}
              </option>
            ))}
          </select>
        )}
        <a href={link.step(source.id, step, "train")}>groups</a>
      </div>
      {error !== null && (
        <p class="failed">
          <Label text={error} max={500} />
        </p>
      )}
      <table class="report">
        <tbody>
          {value?.lines.map(([name, text], place) => (
            <tr key={place}>
              <th scope="row" class={name.startsWith(" ") ? "is-inner" : undefined}>
                <Label text={name.trim()} max={100} />
              </th>
              <td class="num">
                <Label text={text} max={400} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}
