//! Random numbers: the same key gives the same numbers as MLX's Python package.

use mlex_core::{Array, Dtype, Result, random};

use crate::cases::Case;
use crate::one;

pub(crate) fn run(case: &Case) -> Option<Result<Vec<Array>>> {
    let params = &case.params;
    let key = || case.inputs.last().unwrap();
    let shape = || params.ints("shape");
    let float = Dtype::Float32;
    one(match case.op.as_str() {
        "random_key" => random::key(params.get("seed").and_then(|seed| seed.as_u64())?),
        "random_split" => random::split(key(), params.int("num")),
        "random_uniform" => random::uniform(
            params.float("low"),
            params.float("high"),
            &shape(),
            float,
            key(),
        ),
        "random_normal" => random::normal(
            params.float("loc"),
            params.float("scale"),
            &shape(),
            float,
            key(),
        ),
        "random_gumbel" => random::gumbel(&shape(), float, key()),
        "random_bernoulli" => random::bernoulli(params.float("p"), &shape(), key()),
        "random_randint" => random::integers(
            params.int("low"),
            params.int("high"),
            &shape(),
            Dtype::Int32,
            key(),
        ),
        "random_truncated_normal" => random::truncated_normal(
            params.float("low"),
            params.float("high"),
            &shape(),
            float,
            key(),
        ),
        "random_categorical" if params.get("num_samples").is_some() => {
            let count = params.int("num_samples");
            random::categorical_samples(case.x(), params.int("axis"), count, key())
        }
        "random_categorical" => random::categorical(case.x(), params.int("axis"), key()),
        "random_permutation" => random::permutation(params.int("n"), key()),
        _ => return None,
    })
}
