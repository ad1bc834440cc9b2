//! Functions of one and two variables.

use mlex_core::{Array, Result};

use crate::cases::Case;
use crate::one;

pub(crate) fn run(case: &Case) -> Option<Result<Vec<Array>>> {
    let params = &case.params;
    if let Some(output) = unary(&case.op, case.inputs.first()?) {
        return one(output);
    }
    if let [a, b] = &case.inputs[..]
        && let Some(output) = binary(&case.op, a, b)
    {
        return one(output);
    }
    one(match case.op.as_str() {
        "round" => case.x().round(params.int("decimals")),
        "nan_to_num" => case.x().nan_to_num(
            params.float("nan"),
            Some(params.float("posinf")),
            Some(params.float("neginf")),
        ),
        "clip" => case.x().clip(params.float("low"), params.float("high")),
        "where" => case.x().where_(&case.inputs[1], &case.inputs[2]),
        "astype" => case.x().as_type(params.dtype("dtype")),
        _ => return None,
    })
}

fn unary(op: &str, x: &Array) -> Option<Result<Array>> {
    Some(match op {
        "abs" => x.abs(),
        "arccos" => x.arccos(),
        "arcsin" => x.arcsin(),
        "arcsinh" => x.arcsinh(),
        "arctan" => x.arctan(),
        "arctanh" => x.arctanh(),
        "ceil" => x.ceil(),
        "cos" => x.cos(),
        "cosh" => x.cosh(),
        "erf" => x.erf(),
        "erfinv" => x.erfinv(),
        "exp" => x.exp(),
        "expm1" => x.expm1(),
        "floor" => x.floor(),
        "isfinite" => x.is_finite(),
        "isinf" => x.is_inf(),
        "isnan" => x.is_nan(),
        "isneginf" => x.is_neg_inf(),
        "isposinf" => x.is_pos_inf(),
        "log" => x.log(),
        "log10" => x.log10(),
        "log1p" => x.log1p(),
        "log2" => x.log2(),
        "negative" => x.negative(),
        "reciprocal" => x.reciprocal(),
        "rsqrt" => x.rsqrt(),
        "sigmoid" => x.sigmoid(),
        "sign" => x.sign(),
        "sin" => x.sin(),
        "sinh" => x.sinh(),
        "sqrt" => x.sqrt(),
        "square" => x.square(),
        "tanh" => x.tanh(),
        _ => return composed(op, x),
    })
}

/// Activations, put together from operations here; as layers they are mlex-nn's.
fn composed(op: &str, x: &Array) -> Option<Result<Array>> {
    let output = || -> Result<Option<Array>> {
        Ok(Some(match op {
            "silu" => x.multiply(&x.sigmoid()?)?,
            "gelu" => {
                let phi = x.divide(2f32.sqrt())?.erf()?.add(1)?.multiply(0.5)?;
                x.multiply(&phi)?
            }
            "gelu_approx" => {
                let inner = x.power(3)?.multiply(0.044_715)?.add(x)?;
                let scaled = inner.multiply((2.0 / std::f32::consts::PI).sqrt())?;
                x.multiply(&scaled.tanh()?.add(1)?)?.multiply(0.5)?
            }
            "gelu_fast_approx" => x.multiply(&x.multiply(1.702)?.sigmoid()?)?,
            "relu" => x.maximum(0)?,
            "softplus" => x.logaddexp(0.0)?,
            "mish" => x.multiply(&x.logaddexp(0.0)?.tanh()?)?,
            _ => return Ok(None),
        }))
    };
    output().transpose()
}

fn binary(op: &str, a: &Array, b: &Array) -> Option<Result<Array>> {
    Some(match op {
        "arctan2" => a.arctan2(b),
        "bitwise_and" => a.bitwise_and(b),
        "bitwise_or" => a.bitwise_or(b),
        "bitwise_xor" => a.bitwise_xor(b),
        "divide" => a.divide(b),
        "floor_divide" => a.floor_divide(b),
        "left_shift" => a.left_shift(b),
        "logaddexp" => a.logaddexp(b),
        "maximum" => a.maximum(b),
        "minimum" => a.minimum(b),
        "power" => a.power(b),
        "remainder" => a.remainder(b),
        "right_shift" => a.right_shift(b),
        _ => return None,
    })
}
