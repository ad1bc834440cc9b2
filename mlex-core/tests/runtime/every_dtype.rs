//! Every dtype through every operation: a result or an error. An exception on a worker thread of
//! MLX would end the process.

use mlex_core::{Array, AttentionMask, Dtype, Result};

use crate::ramp;

type Operation = (&'static str, fn(&Array) -> Result<Array>);

/// On a matrix of small positive numbers.
const OPERATIONS: &[Operation] = &[
    ("abs", Array::abs),
    ("arccos", Array::arccos),
    ("arccosh", Array::arccosh),
    ("arcsin", Array::arcsin),
    ("arcsinh", Array::arcsinh),
    ("arctan", Array::arctan),
    ("arctanh", Array::arctanh),
    ("bitwise_invert", Array::bitwise_invert),
    ("ceil", Array::ceil),
    ("cos", Array::cos),
    ("cosh", Array::cosh),
    ("erf", Array::erf),
    ("erfinv", Array::erfinv),
    ("exp", Array::exp),
    ("expm1", Array::expm1),
    ("floor", Array::floor),
    ("is_finite", Array::is_finite),
    ("is_inf", Array::is_inf),
    ("is_nan", Array::is_nan),
    ("is_neg_inf", Array::is_neg_inf),
    ("is_pos_inf", Array::is_pos_inf),
    ("log", Array::log),
    ("log10", Array::log10),
    ("log1p", Array::log1p),
    ("log2", Array::log2),
    ("logical_not", Array::logical_not),
    ("negative", Array::negative),
    ("reciprocal", Array::reciprocal),
    ("rsqrt", Array::rsqrt),
    ("sigmoid", Array::sigmoid),
    ("sign", Array::sign),
    ("sin", Array::sin),
    ("sinh", Array::sinh),
    ("sqrt", Array::sqrt),
    ("square", Array::square),
    ("tan", Array::tan),
    ("tanh", Array::tanh),
    ("copy", Array::copy),
    ("add", |x| x.add(x)),
    ("arctan2", |x| x.arctan2(x)),
    ("bitwise_and", |x| x.bitwise_and(x)),
    ("bitwise_or", |x| x.bitwise_or(x)),
    ("bitwise_xor", |x| x.bitwise_xor(x)),
    ("divide", |x| x.divide(x)),
    ("equal", |x| x.equal(x)),
    ("floor_divide", |x| x.floor_divide(x)),
    ("greater", |x| x.greater(x)),
    ("greater_equal", |x| x.greater_equal(x)),
    ("left_shift", |x| x.left_shift(x)),
    ("less", |x| x.less(x)),
    ("less_equal", |x| x.less_equal(x)),
    ("logaddexp", |x| x.logaddexp(x)),
    ("logical_and", |x| x.logical_and(x)),
    ("logical_or", |x| x.logical_or(x)),
    ("maximum", |x| x.maximum(x)),
    ("minimum", |x| x.minimum(x)),
    ("multiply", |x| x.multiply(x)),
    ("not_equal", |x| x.not_equal(x)),
    ("power", |x| x.power(x)),
    ("remainder", |x| x.remainder(x)),
    ("right_shift", |x| x.right_shift(x)),
    ("subtract", |x| x.subtract(x)),
    ("divmod", |x| Ok(x.divmod(x)?.1)),
    ("add a number", |x| x.add(2)),
    ("multiply by a number", |x| x.multiply(0.5)),
    ("round", |x| x.round(1)),
    ("clip", |x| x.clip(1, 2)),
    ("where", |x| x.where_(x, x)),
    ("nan_to_num", |x| x.nan_to_num(0.0, None, None)),
    ("to_fp8", Array::to_fp8),
    ("from_fp8", |x| x.from_fp8(Dtype::Float32)),
    ("view", |x| x.view(Dtype::Uint8)),
    ("all", |x| x.all(&[0], false)),
    ("any", |x| x.any(&[1], false)),
    ("sum", |x| x.sum(&[0], true)),
    ("prod", |x| x.prod(&[0], true)),
    ("mean", |x| x.mean(&[1], true)),
    ("max", |x| x.max(&[1], true)),
    ("min", |x| x.min(&[0], true)),
    ("var", |x| x.var(&[0], true, 0)),
    ("std", |x| x.std(&[1], true, 0)),
    ("logsumexp", |x| x.logsumexp(&[1], true)),
    ("softmax", |x| x.softmax(&[1], false)),
    ("softmax over rows", |x| x.softmax(&[0], true)),
    ("cumsum", |x| x.cumsum(0, false, true)),
    ("cumprod", |x| x.cumprod(1, false, true)),
    ("cummax", |x| x.cummax(0, false, false)),
    ("cummin", |x| x.cummin(1, true, false)),
    ("logcumsumexp", |x| x.logcumsumexp(0, false, true)),
    ("topk", |x| x.topk(1, 1)),
    ("argmax", |x| x.argmax(1, false)),
    ("argmin", |x| x.argmin(0, false)),
    ("sort", |x| x.sort(0)),
    ("argsort", |x| x.argsort(1)),
    ("partition", |x| x.partition(1, 1)),
    ("argpartition", |x| x.argpartition(1, 1)),
    ("tril", |x| x.tril(0)),
    ("eye", |x| Array::eye(2, 3, 0, x.dtype())),
    ("tri", |x| Array::tri(2, 3, 0, x.dtype())),
    ("arange", |x| Array::arange(0.0, 3.0, 1.0, x.dtype())),
    ("linspace", |x| Array::linspace(0.0, 3.0, 4, x.dtype())),
    ("full", |x| Array::full(&[2], 1.5, x.dtype())),
    ("pad", |x| x.pad(&[0], &[(1, 1)], 0.0)),
    ("diag", |x| x.diag(0)),
    ("roll", |x| x.roll(1, 0)),
    ("concatenate", |x| {
        Array::concatenate([x, &ramp(&[1, 2])], 0)
    }),
    ("slice_update", |x| {
        x.slice_update_axis(&ramp(&[1, 2]), 0, 0, 1)
    }),
    ("take by it", |x| ramp(&[2, 2]).take(x, 0)),
    ("take along by it", |x| ramp(&[2, 2]).take_along_axis(x, 1)),
    ("scatter by it", |x| {
        ramp(&[2]).scatter_add([x], &ramp(&[2, 2, 1]), &[0])
    }),
    ("scatter_max", |x| {
        let rows = Array::from_slice(&[0u32], &[1])?;
        x.scatter_max([&rows], &x.slice_axis(0, 0, 1)?.expand_dims(0)?, &[0])
    }),
    ("put_along_axis", |x| x.put_along_axis(&x.argsort(1)?, x, 1)),
    ("masked_scatter", |x| {
        x.masked_scatter(&x.greater(1)?, &ramp(&[4]))
    }),
    ("matmul", |x| x.matmul(x)),
    ("matmul with floats", |x| x.matmul(&ramp(&[2, 2]))),
    ("addmm", |x| x.addmm(x, x, 2.0, 1.0)),
    ("outer", |x| x.outer(x)),
    ("inner", |x| x.inner(x)),
    ("tensordot", |x| x.tensordot(x, &[1], &[0])),
    ("einsum", |x| Array::einsum("ij,jk->ik", [x, x])),
    ("gather_mm", |x| {
        let index = Array::from_slice(&[0u32], &[1])?;
        x.expand_dims(0)?
            .gather_mm(&x.expand_dims(0)?, Some(&index), None, false)
    }),
    ("conv1d", |x| {
        x.expand_dims(0)?.conv1d(&x.expand_dims(0)?, 1, 0, 1, 1)
    }),
    ("rms_norm", |x| x.rms_norm(None, 1e-5)),
    ("layer_norm", |x| x.layer_norm(None, None, 1e-5)),
    ("attention", |x| {
        let x = x.expand_dims(0)?.expand_dims(0)?;
        x.attention(&x, &x, 1.0, AttentionMask::Causal, None)
    }),
];

#[test]
fn a_result_or_an_error() {
    for &dtype in Dtype::ALL {
        let x = ramp(&[2, 2]).add(1.0).unwrap().as_type(dtype).unwrap();
        for (name, operation) in OPERATIONS {
            let result = operation(&x).and_then(|array| array.contiguous());
            let result = result.and_then(|array| array.eval().map(|()| array));
            match result {
                Ok(array) => assert!(array.as_bytes().is_ok(), "{name} of {dtype}"),
                Err(error) => {
                    let text = error.to_string();
                    assert!(!text.contains('\n'), "{name} of {dtype}: {text}");
                }
            }
        }
        for &to in Dtype::ALL {
            let there = x.as_type(to).unwrap();
            assert_eq!(there.dtype(), to);
            there.eval().unwrap();
        }
    }
}
