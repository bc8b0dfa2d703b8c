"""Preflight: everything that a run needs, tried once, each finding with its cure.

The checks go from cheap to expensive. A check that fails stops the later ones, which need its result. A check that
may take long first logs its work and an estimate of its time. Nothing is written outside a temporary directory. A
judge that costs money is asked once about two short attempts, and its line has the cost.
"""

import json
import logging
import math
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

from art_cli.chat.requests import text_of
from art_cli.cli import Finding
from art_cli.cli.doctor import check_gpu
from art_cli.config.compose import LoadedConfig
from art_cli.config.schema import BaseLearnerConfig, TinkerEngineConfig, VllmEngineConfig
from art_cli.config.sections.judge_config import DEFAULT_JUDGE
from art_cli.engines.vllm.arguments import check_gpus, find_vllm, has_gpu
from art_cli.judges import Judge, trial
from art_cli.judges.costs import CostEstimate
from art_cli.judges.retirement import find_retiring, hosted_models, retirement_day
from art_cli.judges.shadow_judges import ShadowJudges
from art_cli.learners import Learner, has_own_weights, load_policy, make_learner
from art_cli.learners.processes.nodes.node_address import Address, read_secret
from art_cli.learners.sft.examples import load_examples
from art_cli.loop import trial_update
from art_cli.loop.decide import decide_by_base, describe, read_sizes
from art_cli.loop.engine_choice import Machine
from art_cli.loop.gpu_fit import describe_use, find_misfit, gpu_use
from art_cli.loop.owed_groups import plan_groups
from art_cli.loop.policy_sampler import open_sampler
from art_cli.loop.record import find_clash
from art_cli.models.base_source import find_base
from art_cli.models.device import memory_there
from art_cli.models.model_shape import read_shape
from art_cli.models.policy_spec import PolicySpec, read_spec, spec_of
from art_cli.models.tokenizer import load_tokenizer, template_cure
from art_cli.models.weights import Weights, count_parameters
from art_cli.reports.pages.conversation_text import last_reply
from art_cli.reports.trackers import check_tracker, trackers_of
from art_cli.rollouts.cluster.cluster_rollout import cluster_rollout
from art_cli.rollouts.cluster.ray_driver import ClusterFacts
from art_cli.rollouts.rollout_gateway import OWN_CLIENT
from art_cli.rollouts.rollout_runner import process_rollout
from art_cli.rollouts.scenario_files import evaluation_scenarios, find_overlap, pools_of, training_scenarios
from art_cli.runs.intervals import share_interval
from art_cli.runs.run_dir import RunDir
from art_cli.runs.storage.object_store import ObjectStore, holder
from art_cli.runs.trajectory import Json, Trajectory, Turn, prompt, sequence
from art_cli.runtime import plugins, threads
from art_cli.runtime.errors import ArtError, EngineError, StorageError, UsageError, printable

log = logging.getLogger(__name__)

OF_SOURCES = ("scenarios", "entries", "rollout", "tools", "tokens", "judge")  # checks that are made for each source
MAX_SHOWN = 200  # characters of the scenario that is shown
CONNECT_TIMEOUT_S = 10.0  # longest wait for a connection to the vLLM server at engine.base_url
SURE, UNLIKELY = 0.5, 1e-3  # probabilities of equal attempts: the model is sure of them; another cause made them equal
OF_WEIGHTS = ("tokens", "update", "disk")  # checks that a search for a prompt has no need of
NO_REWARD = "see what the model said with --show, and docs/zero.md; art plan measures the base over many scenarios"
LONG_ROW_S = 60.0  # an estimate above this comes with its cure
JSON_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
FIRST_STEP = 10  # time of the first step in forward passes: its own 3, and the check of packs in both directions


@dataclass
class Preflight:
    """The checks in order, with the results that later checks need."""

    loaded: LoadedConfig
    scratch: Path
    asks_judge: bool = True
    scenarios: list[Json] = field(default_factory=list)
    weights: Weights | None = None  # None until they are loaded, and if a server has them
    policy: PolicySpec | None = None
    tokenizer: Any = None
    learner: Learner | None = None
    judge: Judge | None = None
    played: list[Trajectory] = field(default_factory=list)  # two attempts at the first scenario of each source
    slowness: str = ""  # why these attempts took longer than they need
    asked: set[str] = field(default_factory=set)  # judges that were asked, because sources may share one
    sources: dict[str, "Preflight"] = field(default_factory=dict)  # by source; "" is this one

    def __post_init__(self) -> None:
        self.sources = {
            name: Preflight(part, self.scratch, self.asks_judge, asked=self.asked) if name else self
            for name, part in self.loaded.by_source.items()
        }

    @property
    def trajectory(self) -> Trajectory | None:
        return self.played[0] if self.played else None

    def check(self) -> Iterator[Finding]:
        """Yields each finding as soon as it is known."""
        named = self.loaded.config.engine
        vllm = named if isinstance(named, VllmEngineConfig) else None  # it ends without a compiler; others are slower
        for found in check_gpu(vllm.python if vllm else None):
            yield found if vllm else found._replace(is_good=True)
            if vllm and not found.is_good:
                return
        yield (engine := self.check_engine())
        if not engine.is_good:
            return
        checks: list[tuple[str, Callable[[Preflight], Finding | None]]] = [
            ("store", Preflight.check_store),
            ("nodes", Preflight.check_nodes),
            ("run", Preflight.check_run),
            ("trackers", Preflight.check_trackers),
            ("retirement", Preflight.check_retirement),
            ("scenarios", Preflight.check_scenarios),
            ("cluster", Preflight.check_cluster),
            ("entries", Preflight.check_entries),
            ("shadow", Preflight.check_shadow),
            ("model", Preflight.check_model),
            ("rollout", Preflight.check_rollout),
            ("tools", Preflight.check_tools),
            ("tokens", Preflight.check_tokens),
            ("update", Preflight.check_update),
            ("judge", Preflight.check_judge),
            ("disk", Preflight.check_disk),
        ]
        for name, check in checks:
            if name in OF_WEIGHTS and not self.loaded.config.learner.trains_weights:
                continue
            for source in self.sources if name in OF_SOURCES else ("",):
                begin = time.perf_counter()
                try:
                    finding = check(self._of(source))
                except ArtError as error:
                    yield Finding(f"{name} {source}".rstrip(), False, str(error))
                    return
                if finding is None:
                    continue
                took = time.perf_counter() - begin
                called = f"{finding.name} {source}".rstrip()
                yield finding._replace(name=called, message=f"{finding.message} ({took:.1f} s)")
                if not finding.is_good:
                    return

    def _of(self, source: str) -> "Preflight":
        """Returns the preflight of a source, which has the results of this one; "" is this one."""
        if not source:
            self.played = [each for part in self.sources.values() for each in part.played]
            return self
        part = self.sources[source]
        part.loaded = self.loaded.by_source[source]
        part.weights, part.policy = self.weights, self.policy
        part.tokenizer, part.learner = self.tokenizer, self.learner
        return part

    def close(self) -> None:
        if self.learner is not None:
            self.learner.close()
        for part in self.sources.values():
            if part.judge is not None:
                threads.run(part.judge.close())

    def check_engine(self) -> Finding:
        """Returns the engine and learner of the run. A vLLM that the configuration names must work."""
        engine = self.loaded.config.engine
        if isinstance(engine, VllmEngineConfig):
            problem, cure = _vllm_problem(engine, self.loaded.config.model.quantize)
            if problem:
                return Finding("engine", False, problem, cure)
        return Finding("auto", True, describe(self.loaded))

    def check_nodes(self) -> Finding | None:
        """Checks that the learner's other nodes could reach this machine. Returns None if there are no others."""
        learner = self.loaded.config.learner
        if learner.nodes == 1:
            return None
        assert isinstance(learner, BaseLearnerConfig) and learner.rendezvous is not None
        address = Address.parse(learner.rendezvous)
        secret = read_secret(address)
        try:
            socket.create_server(address).close()
        except OSError as error:
            cure = "set learner.rendezvous to an address of this machine and a free port"
            return Finding("nodes", False, f"cannot listen at {address}: {error.strerror or error}", cure)
        ranks = f"{learner.nodes} nodes x {learner.processes} processes = {learner.num_ranks} ranks"
        note = "" if secret else "; without a secret, because only this machine reaches it"
        return Finding(
            "nodes", True, f"{ranks}, which meet at {address}{note}; the update below is this machine's alone"
        )

    def check_run(self) -> Finding | None:
        """Returns what `art train` would do with the existing run of this name, or None if there is no such run."""
        run = RunDir(self.loaded.config.runs / self.loaded.config.name)
        steps = run.checkpoint_steps()
        if not steps:
            return None
        if clash := find_clash(run, self.loaded):
            return Finding("run", False, clash)
        return Finding("run", True, f"{run.root}: art train goes on from step {steps[-1]}")

    def check_store(self) -> Finding | None:
        """Writes an object beside the runs and removes it again. Returns None if the run has no store."""
        if (address := self.loaded.config.store) is None:
            return None
        store, name = ObjectStore(address), f"art-check-{uuid.uuid4().hex[:12]}"
        try:
            is_made = store.create(name, b"art")
            is_made_again = store.create(name, b"again")
            is_read = store.read(name, limit=100) == b"art"
            store.delete([name])
            if busy := holder(store / self.loaded.config.name):
                return Finding("store", False, busy)
        except StorageError as error:
            cure = "mend the address, or give this machine the right to list, read, write and delete there"
            return Finding("store", False, str(error), cure)
        if not is_made or not is_read:
            return Finding("store", False, f"{address}: what is written there cannot be read", "name another store")
        note = "; it makes an object twice, so never start two machines on one run in the same second"
        return Finding("store", True, f"{address}: can be written{note if is_made_again else ''}")

    def check_trackers(self) -> Finding | None:
        """Looks for the trackers' packages and keys, without a request. Returns None if the run has no tracker."""
        chosen = trackers_of(self.loaded.config)
        for tracker in chosen:
            try:
                check_tracker(tracker)
            except UsageError as error:
                problem, _, cure = str(error).partition("; ")
                return Finding("trackers", False, problem, cure)
        names = ", ".join(getattr(each, "entry", each.name) for each in chosen)
        return Finding("trackers", True, names) if chosen else None

    def check_retirement(self) -> Finding | None:
        """Looks up the days on which providers shut the run's models down. Returns None if no provider hosts any."""
        models = list(dict.fromkeys(hosted_models(self.loaded.config)))
        retiring = find_retiring(models)
        if retiring:
            cure = f"name another model (the default is {DEFAULT_JUDGE}), and measure it: art judge FILE --probe"
            return Finding("retirement", not retiring[0].is_over, "; ".join(map(str, retiring)), cure)
        known = [f"{model} {retirement_day(model) or 'has no day in the table of litellm'}" for model in models]
        return Finding("retirement", True, ", ".join(known)) if models else None

    def check_scenarios(self) -> Finding:
        config = self.loaded.config
        self.scenarios, note = training_scenarios(config, self.loaded.directory), ""
        counts = [f"{len(self.scenarios)} to train on"]
        if config.rollout.pool is not None:
            counts[0] += f" in {len(set(pools_of(self.scenarios, config.rollout.pool)))} pools"
        if config.eval:
            held_out = evaluation_scenarios(config, self.loaded.directory)
            counts.append(f"{len(held_out)} to evaluate on")
            note = str(find_overlap(self.scenarios, held_out))
            if config.eval.held_out is not None and not note:
                counts[-1] += ", held out: none of them is trained on"
        if config.sft:
            examples = load_examples(config.sft, self.loaded.directory)
            counts.append(f"{len(examples.trained)} sft examples")
            if examples.evaluated:
                counts[-1] += f" and {len(examples.evaluated)} to evaluate them on"
        counts.append(f"the first is {printable(json.dumps(self.scenarios[0], ensure_ascii=False), limit=MAX_SHOWN)}")
        return Finding("scenarios", True, ", ".join(counts), note)

    def check_cluster(self) -> Finding | None:
        """Asks the cluster that plays the rollouts. Returns None if this machine plays them."""
        cluster = self.loaded.config.rollout.cluster
        if cluster is None:
            return None
        facts = threads.run(self._ask_cluster())
        message = (
            f"Ray {facts.version}, {facts.nodes} nodes, {facts.processors:g} processors, {facts.free:g} of them free; "
            f"nodes reach this machine at {facts.host}"
        )
        cure = "rollouts wait until as many processors are free" if facts.free < cluster.cpus else ""
        return Finding("cluster", True, message, cure)

    async def _ask_cluster(self) -> ClusterFacts:
        """Returns the cluster's facts. Raises UsageError or RolloutError if it cannot be used."""
        rollout = cluster_rollout(self.loaded.config, self.loaded.directory)
        try:
            return await rollout.connect()
        finally:
            await rollout.close()

    def check_entries(self) -> Finding:
        config = self.loaded.config
        self.judge = trial.make_trial_judge(config.judge, self.loaded.directory)
        for name, model in trial.missing_keys(config.judge, self.loaded.directory).items():
            cure = f"set it in the environment, or in a file .env in {self.loaded.directory}"
            return Finding("judge", False, f"{name} is not set, and {model} needs it", cure)
        if config.rollout.command:
            program = config.rollout.command[0]
            gets = f"it gets {', '.join(config.rollout.env) or 'none'} of your variables and keys (rollout.env)"
            return Finding("entries", True, f"rollout.command {program}, judge {config.judge.name}; {gets}")
        entry, environment, python = config.rollout.entry, config.rollout.environment, config.rollout.python
        where = ""
        if config.rollout.cluster is not None:
            where = " on the cluster's nodes"  # only the nodes may have what it imports
        elif environment is not None or python is not None:
            version = threads.run(self._load_elsewhere())
            where = "" if python is None else f" in Python {version} at {python}"
        elif entry is not None:
            plugins.resolve(entry, base=self.loaded.directory)
        rollout = entry if environment is None else environment.name
        return Finding("entries", True, f"rollout {rollout}{where}, judge {config.judge.name}")

    async def _load_elsewhere(self) -> str:
        """Loads the rollout in its Python and returns that version. Raises UsageError or RolloutError if it cannot."""
        process = process_rollout(self.loaded.config.rollout, self.loaded.directory)
        await process.open()
        await process.close()
        return process.version

    def check_model(self) -> Finding:
        model = self.loaded.config.model
        if not self.loaded.config.engine.can_train:
            self.learner = make_learner(self.loaded.config, None, directory=self.loaded.directory)
            return Finding("model", True, f"{model.base}, whose prompt is searched for")
        base = find_base(model.base, directory=self.loaded.directory, built=self.scratch / "base")
        self.loaded = decide_by_base(self.loaded, base)
        config = self.loaded.config
        if isinstance(config.engine, TinkerEngineConfig):
            return self._check_remote_model(config.engine, base)
        note = ""
        if (sized := read_sizes(config, read_shape(base), Machine())) is not None:
            if (misfit := find_misfit(config, *sized, os.environ)) is not None:
                return Finding("model", False, misfit.problem, misfit.cure or "take a smaller model, or more GPUs")
            note = describe_use(gpu_use(config, *sized, os.environ), sized[0])
        log.info("model: importing torch and transformers, about 10 s, then loading %s%s", base, _size(base))
        self.weights = load_policy(config, base)
        self.policy, self.tokenizer = spec_of(self.weights), self.weights.tokenizer
        once = config.train.model_copy(update={"epochs_per_step": 1})  # a second epoch would show nothing new
        config = config.model_copy(update={"train": once})
        if config.learner.nodes > 1:
            alone = config.learner.model_copy(update={"nodes": 1})
            config = config.model_copy(update={"learner": alone})
        self.learner = make_learner(config, self.weights, directory=self.loaded.directory)
        size = count_parameters(self.weights.model)
        return Finding(
            "model",
            True,
            f"{config.model.base}: {size.whole / 1e6:.1f}M parameters, {size.trained / 1e6:.2f}M trained, "
            f"{self.weights.max_length} tokens of context, on {self.weights.device}{note}",
        )

    def _check_remote_model(self, engine: TinkerEngineConfig, base: str) -> Finding:
        """Asks the server for its models. Only the base's configuration and tokenizer are needed here."""
        from art_cli.tinker.client.remote_server import find_server, load_sdk

        self.policy = read_spec(self.loaded.config.model, base, is_remote=True)
        self.tokenizer = load_tokenizer(base)
        if self.policy.chat_template is not None:
            self.tokenizer.chat_template = self.policy.chat_template
        version = load_sdk().__version__
        server, name = find_server(engine), engine.base_model or self.loaded.config.model.base
        model = server.find_model(name)
        if model.max_context_length is not None and self.policy.max_length > model.max_context_length:
            message = (
                f"{name} at {server.url}: {model.max_context_length} tokens of context, and model.max_length is more"
            )
            return Finding("model", False, message, f"set model.max_length={model.max_context_length}")
        self.learner = make_learner(self.loaded.config, self.policy, directory=self.loaded.directory)
        message = f"{name} at {server.url}, {self.policy.max_length} tokens of context, tinker {version} here"
        return Finding("model", True, f"{message}; the server sets the scale of an adapter, not model.lora.alpha")

    def check_rollout(self) -> Finding:
        """Plays two attempts at the first scenario at once, as training does."""
        rollout = self.loaded.config.rollout
        log.info(
            "rollout: two attempts at once, of %d turns at most with %d tokens each; rollout.timeout_s ends one after "
            "%g s",
            rollout.max_turns,
            rollout.sampling.max_tokens,
            rollout.timeout_s,
        )
        self.played = threads.run(self._play_pair())
        for trajectory in self.played:
            if problem := self._rollout_problem(trajectory):
                return problem
        first = self.played[0]
        reward = (
            "no reward (a judge gives it)" if first.returned_reward is None else f"reward {first.returned_reward:g}"
        )
        num_tokens = first.num_sampled or first.metrics.get("num_completion", 0)
        message = f"{first.metrics['num_turns']:.0f} turns, {num_tokens:.0f} sampled tokens, {reward}"
        message += f'; the last reply is "{last_reply(first)}"{_base_success(self.played)}'
        cures = [self.slowness, _sampling_note(self.played), NO_REWARD if _is_unrewarded(self.played) else ""]
        return Finding("rollout", True, message, "; ".join(filter(None, cures)))

    def _rollout_problem(self, trajectory: Trajectory) -> Finding | None:
        if trajectory.error:
            return Finding("rollout", False, trajectory.error, f"mend the rollout; it failed on {self._first_id()}")
        if trajectory.returned_reward is None and self.judge is not None and self.judge.needs_reward:
            return Finding(
                "rollout", False, "it returned no reward, and judge is 'rollout'", "return one, or choose a judge"
            )
        if self._made_no_call(trajectory):
            return self._silence_problem()
        is_greedy = bool(trajectory.turns) and all(turn.temperature == 0.0 for turn in trajectory.turns)
        if is_greedy and self.loaded.config.learner.trains_weights:
            return Finding(
                "rollout",
                False,
                "it samples at temperature 0: all attempts of a group say the same, and nothing is learned from them",
                "leave temperature out of the agent's call, or set rollout.sampling.force=true "
                "(and rollout.sampling.temperature above 0)",
            )
        return None

    def _made_no_call(self, trajectory: Trajectory) -> bool:
        return not trajectory.turns if self.policy is not None else trajectory.is_silent

    def _first_id(self) -> str:
        return f"the first scenario, {printable(str(self.scenarios[0]['id']), limit=MAX_SHOWN)}"

    def _silence_problem(self) -> Finding:
        """Returns the finding for an attempt that made no model call."""
        if self.loaded.config.rollout.environment is not None:
            message = "the game was over before the policy's seat had a move"
            return Finding("rollout", False, message, "begin with another seed: rollout.environment.seed=1")
        if all(map(self._made_no_call, self.played)):
            cure = (
                "use policy.client, or policy.base_url and api_key; or a `try` of the agent hides why its call failed"
            )
            return Finding("rollout", False, "it made no model call", cure)
        message = "of two attempts at once one made no model call: they may have gone into the other's trajectory"
        return Finding("rollout", False, message, OWN_CLIENT)

    async def _play_pair(self) -> list[Trajectory]:
        played: list[Trajectory] = []
        plans = plan_groups(self.scenarios[:1], step=0, group_size=2)
        policy = self.weights or self.policy
        async with open_sampler(self.loaded, policy, checkpoint=None, step=0, logs=self.scratch) as sampler:
            await sampler.play_shown(plans, played.append, title="check")
            self.slowness = await sampler.runner.explain_slowness()
        return sorted(played, key=lambda trajectory: trajectory.index)

    def check_tools(self) -> Finding | None:
        """Checks that the chat template shows the agent's tools to the model. Returns None if the agent sends none, or
        the template is a server's."""
        if self.policy is None:
            return None
        with_tools = next((trajectory for trajectory in self.played if trajectory.tools), None)
        if with_tools is None:
            return None
        names = ", ".join(str(_name(tool)) for tool in with_tools.tools[:5])
        if _shows_tools(self.tokenizer, with_tools):
            odd = ", ".join(printable(str(_name(tool)), limit=64) for tool in with_tools.tools if _is_odd(tool))
            cure = f"OpenAI's API would refuse {odd}: mend its name or the types of its parameters" if odd else ""
            return Finding("tools", True, f"the chat template shows {names}", cure)
        cure = f"{template_cure(self.tokenizer)} in model.chat_template, or choose a model whose template shows tools"
        return Finding("tools", False, f"the chat template leaves out the tools: the model never sees {names}", cure)

    def check_tokens(self) -> Finding:
        """Compares a trajectory's logprobs in engine and learner, and its tokens with its re-encoded text."""
        assert self.policy and self.learner and self.trajectory
        turns = self.trajectory.turns
        took = self.trajectory.duration_s
        log.info("tokens: the learner scores the first attempt again, in less than the %.0f s that it took", took + 1)
        tokenizer: Any = self.tokenizer
        last = prompt(turns, len(turns) - 1)
        is_same = tokenizer.encode(tokenizer.decode(last), add_special_tokens=False) == last
        gaps = [gap for index in range(len(turns)) for gap in self._gaps(turns, index)] or [0.0]
        num_branches = sum(turn.parent is None or turn.kept < len(sequence(turns, turn.parent)) for turn in turns) - 1
        mean = fmean(gaps)
        message = f"engine and learner differ by {mean:.1e} nats, {max(gaps):.1e} at most, {num_branches} branches"
        if mean > self.loaded.config.train.max_logprob_gap:
            return Finding("tokens", False, message, "engine and learner do not compute the same model")
        cure = (
            "" if is_same else "text and tokens do not map one to one here; recorded tokens are trained on as they are"
        )
        if num_branches:
            cure = "a prompt does not extend the turn before it (edited history, or its template): slower, still right"
        return Finding("tokens", True, message, cure)

    def _gaps(self, turns: Sequence[Turn], index: int) -> list[float]:
        """Returns |engine - learner| in nats of each of a turn's sampled tokens; none with top_p or top_k."""
        turn = turns[index]
        if turn.is_truncated_sampling or not turn.sampled_ids:
            return []
        assert self.learner
        scores = self.learner.score(sequence(turns, index), temperature=turn.temperature)
        return [abs(a - b) for a, b in zip(scores[-len(turn.logprobs) :], turn.logprobs, strict=True)]

    def check_update(self) -> Finding:
        """Takes a step on a row as long as a played attempt, forward and backward, with made-up tokens.

        Where the limits allow a longer row, its time and memory are estimated.
        """
        assert self.policy and self.learner and self.trajectory
        played = max(
            len(sequence(attempt.turns, index)) for attempt in self.played for index in range(len(attempt.turns))
        )
        own_prompt = len(prompt(self.trajectory.turns, 0))
        longest = min(self.policy.max_length, own_prompt + self.loaded.config.rollout.longest_answer)
        length = min(played, longest, trial_update.MAX_TOKENS)
        log.info("update: a step on a row of %d tokens, %s", length, self._update_takes(length))
        learns_by = self.loaded.config.learns_by
        metrics = trial_update.step(self.learner, length, vocabulary=self.policy.vocabulary, parts=learns_by.parts)
        if metrics.num_updates == 0:
            return Finding("update", True, "not tried: this loss learns nothing from made-up attempts")
        message = f"a row of {length} tokens forward and backward in {metrics.train_s:.1f} s"
        if longest <= length or self.weights is None or has_own_weights(self.loaded.config):
            return Finding("update", True, message)
        second = trial_update.second_length(length, longest)
        most_s = metrics.train_s * (1 + second / length)
        log.info("update: rows of %d and %d tokens, to estimate longer ones: %.0f s at most", length, second, most_s)
        whole = trial_update.forecast(self.learner, self.weights, length, longest, parts=learns_by.parts)
        message += f"; the longest row that the limits allow has {longest:,} tokens and would take {whole}"
        is_large = whole.seconds > LONG_ROW_S or (whole.gigabytes or 0.0) > memory_there(self.weights)
        cure = f"model.max_length makes it shorter: the longest attempt here had {played:,} tokens" if is_large else ""
        return Finding("update", True, message, cure)

    def _update_takes(self, length: int) -> str:
        """Estimates the time of the first step on a row of that length from a forward pass over such a row."""
        assert self.policy and self.learner
        begin = time.perf_counter()
        self.learner.score([index % self.policy.vocabulary for index in range(length)])
        return f"about {FIRST_STEP * (time.perf_counter() - begin):.0f} s"

    def check_shadow(self) -> Finding | None:
        """Loads the shadow judges and looks for their keys, without a call. Returns None if there are none."""
        shadow, directory = self.loaded.config.shadow, self.loaded.directory
        threads.run(ShadowJudges(shadow, directory).close())
        for name, each in shadow.items():
            for key, model in trial.missing_keys(each.judge, directory).items():
                cure = f"set it in the environment, or in a file .env in {directory}"
                return Finding("shadow", False, f"{name}: {key} is not set, and {model} needs it", cure)
        names = [f"{name} ({each.judge.name}, {each.share:.0%} of the groups)" for name, each in shadow.items()]
        return Finding("shadow", True, ", ".join(names)) if names else None

    def check_judge(self) -> Finding | None:
        """Asks the judge. Returns None if the reward is the rollout's."""
        assert self.judge
        notes, cures = [], []
        for number, part in enumerate(self.judge.parts):
            same = f"{number} {self.loaded.config.judge.model_dump_json()}"
            if same in self.asked:
                notes.append(f"{part.title}: the same judge as above")
            elif (expected := part.estimate(trial.short_attempts())) is not None:
                note, cure = self._ask_once(part, expected)
                self.asked.add(same)
                notes.append(note)
                cures += [cure] if cure else []
            elif not part.needs_reward:
                log.info("judge: %s scores the two attempts", part.title)
                verdicts = threads.run(trial.judge_in_time(part, self.played))
                rewards = [f"{verdicts[trajectory.id].reward:g}" for trajectory in self.played]
                notes.append(f"{part.title} gave the two attempts {' and '.join(rewards)}")
        return Finding("judge", True, "; ".join(notes), "; ".join(cures)) if notes else None

    def _ask_once(self, judge: Judge, expected: CostEstimate) -> tuple[str, str]:
        """Asks a judge that costs money; returns the line and the cure, or "" if none is needed. Raises JudgeError."""
        models, would = judge.title, _as_price(expected)
        if not self.asks_judge:
            return f"{models}: not asked (--no-judge); asking once about two short attempts would take {would}", ""
        log.info("judge: asking %s once about two short attempts: %s", models, would)
        asked = threads.run(trial.run_trial(judge))
        cost = "price unknown" if asked.usage.cost_usd is None else f"${asked.usage.cost_usd:.4f}"
        took = f"{asked.usage.calls} calls, {asked.usage.tokens:,} tokens, {cost}"
        is_sound = asked.right > asked.wrong
        cure = "" if is_sound else "it prefers no right answer to two plus two; look at judge.model and judge.rubric"
        return f"{models} gave a right answer {asked.right:g} and a wrong one {asked.wrong:g}: {took}", cure

    def check_disk(self) -> Finding:
        """Compares the free space with what all kept checkpoints and the trajectories of every step need."""
        assert self.learner and self.trajectory
        config = self.loaded.config
        checkpoint = self.scratch / "checkpoint"
        checkpoint.mkdir()
        if self.weights is not None:  # the disk of a server is its own
            self.learner.save(checkpoint)
        one = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        line = (
            len(json.dumps(self.trajectory.messages))
            + 40 * self.trajectory.num_sampled
            + 6 * len(sequence(self.trajectory.turns, 0))
        )
        num_groups = config.rollout.groups_per_step + config.rollout.num_spare
        lines = 2 * line * config.rollout.group_size * num_groups * config.train.steps
        needed = (
            one * (config.train.keep_checkpoints + 3) + lines
        )  # 3 more: step 0, the best one, and one while it is written
        existing = next(path for path in [config.runs, *config.runs.parents] if path.exists())
        free = shutil.disk_usage(existing).free
        message = f"about {needed / 1e9:.2f} GB needed under {config.runs}, {free / 1e9:.1f} GB free"
        return Finding("disk", needed < free, message, "" if needed < free else "free some, or set `runs` elsewhere")


def _size(base: str) -> str:
    """Returns the size of a directory's weights as text, or "" for a base on the hub."""
    size = sum(path.stat().st_size for path in Path(base).glob("*.safetensors"))
    return f" ({size / 1e9:.1f} GB)" if size else ""


def _vllm_problem(engine: VllmEngineConfig, quantize: str | None) -> tuple[str, str]:
    """Returns the reason why the configuration's vLLM cannot be used, or "" if none is known, and the cure."""
    cure = "pip install 'art-cli[vllm]', name a Python that has it in engine.python, or engine=embedded"
    if engine.base_url is not None:
        address = urlsplit(engine.base_url)
        try:
            socket.create_connection((address.hostname or "", address.port or 80), CONNECT_TIMEOUT_S).close()
        except (OSError, ValueError) as error:
            return (
                f"engine.base_url: nothing answers at {engine.base_url}: {error}",
                "start it, or mend engine.base_url",
            )
        return "", ""
    try:
        if has_gpu({**os.environ, **engine.env}):
            check_gpus(engine)
    except EngineError as error:
        return str(error), ""
    if engine.python is None and find_spec("vllm") is None:
        return "engine is vllm, and vLLM is not installed", cure
    vllm = find_vllm(engine.python)
    if not vllm.version:
        return f"engine is vllm, and vLLM does not work in {vllm.python}: {vllm.error}", cure
    return vllm.lacks(quantize), vllm.plugin_cure


def _is_unrewarded(played: Sequence[Trajectory]) -> bool:
    return all(each.returned_reward is not None and each.returned_reward <= 0 for each in played)


def _base_success(played: Sequence[Trajectory]) -> str:
    """Returns the share of attempts with a reward above 0 and its interval, or "" where a judge gives the rewards."""
    rewards = [each.returned_reward for each in played if each.returned_reward is not None]
    if len(rewards) < len(played):
        return ""
    num = sum(reward > 0 for reward in rewards)
    low, high = share_interval(num / len(rewards), len(rewards))
    return f"; {num} of {len(rewards)} attempts got more than 0 (95 % interval {low:.0%} to {high:.0%})"


def _sampling_note(played: Sequence[Trajectory]) -> str:
    """Returns the cause of equal attempts in their sampling, or "" if there is none.

    Equal attempts have a cause that their probability shows: the model is sure of them, or only top_p and top_k are, or
    they are so unlikely that something fixed the draw.
    """
    turns = [turn for trajectory in played for turn in trajectory.turns]
    if not turns:
        return ""
    if any(turn.temperature == 0.0 for turn in turns):
        return "some calls set temperature 0: what they say is the same in every attempt; rollout.sampling.force=true"
    first, *others = ([turn.sampled_ids for turn in trajectory.turns] for trajectory in played)
    if not others or any(other != first for other in others):
        return ""
    whole = played[0].turns
    likelihood = math.exp(sum(sum(turn.logprobs) for turn in whole))
    raw = math.exp(sum(sum(turn.logprobs if turn.raw_logprobs is None else turn.raw_logprobs) for turn in whole))
    if likelihood > SURE and raw <= SURE and any(turn.top_p < 1 or turn.top_k for turn in whole):
        return "both attempts sampled the same tokens: top_p or top_k leaves no others; rollout.sampling.force=true"
    if likelihood > SURE:
        return (
            f"both attempts sampled the same tokens, which the model does with probability {likelihood:.2f}: it is too "
            "sure to learn from; raise rollout.sampling.temperature, or choose another scenario or model"
        )
    if likelihood < UNLIKELY:
        return (
            "both attempts sampled the same tokens, which is no chance: does the agent set a `seed`, or a format that "
            "leaves one answer? rollout.sampling.force=true"
        )
    return ""


def _name(tool: Json) -> object:
    return tool.get("function", {}).get("name")


def _is_odd(tool: Json) -> bool:
    """Returns True if OpenAI's API would refuse the tool's name, or the types of its parameters."""
    schema = tool.get("function", {}).get("parameters") or {}
    properties = schema.get("properties", {}) if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or not re.fullmatch(r"[\w-]{1,64}", str(_name(tool) or ""), re.ASCII):
        return True
    kinds = [each.get("type") if isinstance(each, dict) else "" for each in properties.values()]
    return any(isinstance(kind, str) and kind not in JSON_TYPES for kind in kinds)


def _shows_tools(tokenizer: Any, trajectory: Trajectory) -> bool:
    """Whether the trajectory's first prompt changes when its tools are left out."""
    asked = []
    for message in trajectory.messages:
        if message["role"] == "assistant":
            break
        role = "system" if message["role"] == "developer" else message["role"]
        asked.append({"role": role, "content": text_of(message.get("content"))})
    asked = asked or [{"role": "user", "content": "hi"}]
    try:
        rendered = [
            tokenizer.apply_chat_template(asked, tools=tools, tokenize=False, add_generation_prompt=True)
            for tools in (trajectory.tools, None)
        ]
    except Exception:  # a template may fail in any way; the rollout's own calls succeeded
        return True
    return bool(rendered[0] != rendered[1])


def _as_price(expected: CostEstimate) -> str:
    price = "at a price that is not known" if expected.usd is None else f"about ${expected.usd:.4f}"
    tokens = expected.prompt_tokens + expected.completion_tokens
    return f"{expected.calls} calls, about {tokens:,} tokens, {price}"
