"""The parameters of --set, and the configurations that they make."""

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from dlio.errors import UsageError
from dlio.features.search.search_space import (
    filled_in,
    grid_of,
    parse_space,
    parse_words,
    train_words,
    with_point,
)
from dlio.train.config import train_config

RUN = train_config("data")


def test_ranges_and_lists_have_the_types_of_their_options() -> None:
    axes = parse_space(
        [
            "lr=1e-4..1e-1:log",
            "batch-size=16..64",
            "exchange=allreduce,diloco(32,rate=0.7)",
            "model.width=8..32",
            "momentum=0.9,0.99",
        ],
        RUN,
    )
    assert axes == {
        "lr": FloatDistribution(1e-4, 1e-1, log=True),
        "batch-size": IntDistribution(16, 64),
        "exchange": CategoricalDistribution(("allreduce", "diloco(32,rate=0.7)")),
        "model.width": IntDistribution(8, 32),
        "momentum": CategoricalDistribution((0.9, 0.99)),
    }


@pytest.mark.needs("skipping")
def test_lists_of_yes_and_no_have_the_type_of_their_option() -> None:
    axes = parse_space(["skip_samples=yes,no"], RUN)
    assert axes == {"skip-samples": CategoricalDistribution((True, False))}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("larning-rate=1..2", "no option of `dlio train`"),
        ("batchsize=16,32", "did you mean batch-size?"),
        ("lr=0..1:log", "above 0"),
        ("lr=1..0.1", "the lower one first"),
        ("lr=a..b", "numbers at both ends"),
        ("batch-size=0,16", "--batch-size 0"),
        ("batch-size=1.5..3", "whole numbers"),
        ("momentum=0..1", "--momentum 1"),
        ("exchange=allreduce..gossip", "numbers at both ends"),
        ("exchange=allreduce,gosip", "gosip"),
        ("optimizer=1..2", "list its values"),
        ("lr", "NAME=VALUES"),
        ("lr=1,1", "names a value twice"),
        ("checkpoint=a,b", "no option"),
        ("model.width=16,b", "width='b' is not int"),
        ("model.width=8.5..16", "width=8.5 is not int"),
        ("model.widht=8,16", "widht"),
        ("model=resnet,vit(width=100)", "a multiple of its 3 heads"),
        ("model=resnet,dlio.train.networks.mlp:Mlp(depth='a')", "depth='a' is not int"),
    ],
)
def test_an_invalid_parameter_is_refused_with_its_remedy(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_space([text], RUN)
    assert said in str(caught.value)


def test_a_point_sets_options_and_the_models_own() -> None:
    run = train_config("data", model="resnet(width=16)", lr=1.0)
    config = with_point(run, {"lr": 0.5, "model.depth": 3, "model.width": 8})
    assert (config.optimizer.lr, config.model.model) == (0.5, "resnet(width=8,depth=3)")
    assert train_words({"lr": 0.5, "model.depth": 3}, run) == [
        *("--lr", "0.5"),
        *("--model", "resnet(width=16,depth=3)"),
    ]


def test_a_grid_has_all_combinations_and_refuses_real_ranges() -> None:
    axes = parse_space(["lr=0.1,1", "batch-size=2..4"], RUN)
    assert [tuple(each.values()) for each in grid_of(axes)] == [
        (lr, batch) for lr in (0.1, 1.0) for batch in (2, 3, 4)
    ]
    with pytest.raises(UsageError, match="list its values"):
        grid_of(parse_space(["lr=0.1..1"], RUN))


def test_a_scripts_arguments_and_parameters_have_to_name_each_other() -> None:
    words = ["train.py", "--lr={lr}", "{n}"]
    axes = parse_words(["lr=0.1,x", "n=1..3"], words)
    assert axes == {"lr": CategoricalDistribution((0.1, "x")), "n": IntDistribution(1, 3)}
    assert filled_in(words, {"lr": 0.1, "n": 2}) == ["train.py", "--lr=0.1", "2"]
    with pytest.raises(UsageError, match="do not use it"):
        parse_words(["lr=1,2", "n=1..3", "m=1,2"], words)
    with pytest.raises(UsageError, match="did you mean"):
        parse_words(["lr=1,2"], ["train.py", "{lr}", "{lr2}"])
