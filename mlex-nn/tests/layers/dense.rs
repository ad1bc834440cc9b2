//! Norms, activations, dense weights.

use mlex_core::Array;
use mlex_nn::activation::{gelu, gelu_fast, gelu_tanh, relu2, silu};
use mlex_nn::{Activation, Embedding, LayerNorm, Linear, QuantizationConfig, Result, RmsNorm};

use crate::cases::Case;
use crate::{one, weights};

pub(crate) fn run(case: &Case) -> Option<Result<Vec<Array>>> {
    let x = case.x();
    let dense = QuantizationConfig::default;
    let gated = |activation: Activation| activation.gated(x, &case.inputs[1]);
    one(match case.op.as_str() {
        "rms_norm" => {
            let weights = weights(case, &["weight"], dense());
            RmsNorm::load(&weights, last(x), case.params.float("eps"))
                .and_then(|norm| norm.forward(x))
        }
        "layer_norm" => {
            let weights = weights(case, &["weight", "bias"], dense());
            LayerNorm::load(&weights, last(x), case.params.float("eps"))
                .and_then(|norm| norm.forward(x))
        }
        "silu" => silu(x),
        "gelu" => gelu(x),
        "gelu_tanh" => gelu_tanh(x),
        "gelu_fast" => gelu_fast(x),
        "relu2" => relu2(x),
        "swiglu" => gated(Activation::Silu),
        "geglu" => gated(Activation::Gelu),
        "geglu_tanh" => gated(Activation::GeluTanh),
        "linear" => {
            let weights = weights(case, &["weight", "bias"], dense());
            let rows = case.named("weight")?.shape()[0];
            Linear::load(&weights, last(x), rows, case.named("bias").is_some())
                .and_then(|linear| linear.forward(x))
        }
        "embedding" => {
            let weights = weights(case, &["weight"], dense());
            let table = case.named("weight")?.shape();
            Embedding::load(&weights, table[0], table[1]).and_then(|embedding| embedding.forward(x))
        }
        _ => return None,
    })
}

fn last(x: &Array) -> i32 {
    x.dim(-1).unwrap()
}
