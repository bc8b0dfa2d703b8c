"""What a judge has spent and how it was told to judge, whichever judge it is."""

from art_cli.judges import Judge
from art_cli.judges.blend import BlendJudge
from art_cli.judges.cache import Usage
from art_cli.judges.ruler import RulerJudge


def usage_of(judge: Judge) -> tuple[Usage, int]:
    """What this process paid, and the votes that it had from the cache."""
    rulers = _rulers(judge)
    return sum((ruler.usage for ruler in rulers), Usage()), sum(ruler.num_cached for ruler in rulers)


def settings_of(judge: Judge) -> frozenset[str]:
    """The digests that this judge's scores may carry."""
    return frozenset(ruler.settings for ruler in _rulers(judge))


def _rulers(judge: Judge) -> list[RulerJudge]:
    if isinstance(judge, BlendJudge):
        return [ruler for part in judge.judges.values() for ruler in _rulers(part)]
    return [judge] if isinstance(judge, RulerJudge) else []
