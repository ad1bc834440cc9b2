//! Convolutions, channels last as MLX has them.

use super::unless_empty;
use crate::ffi::op;
use crate::{Array, Error, ErrorKind, Result};

impl Array {
    /// `self` `[B, L, C]` with `weight` `[O, K, C / groups]`: `[B, L', O]`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    #[track_caller]
    pub fn conv1d(
        &self,
        weight: &Array,
        stride: i32,
        padding: i32,
        dilation: i32,
        groups: i32,
    ) -> Result<Array> {
        check_groups(groups)?;
        unless_empty(op!(mlx_conv1d(
            self.raw(),
            weight.raw(),
            stride,
            padding,
            dilation,
            groups
        )))
    }

    /// `self` `[B, H, W, C]` with `weight` `[O, KH, KW, C / groups]`: `[B, H', W', O]`.
    /// Pairs are (height, width).
    ///
    /// # Errors
    /// When the shapes do not fit.
    #[track_caller]
    pub fn conv2d(
        &self,
        weight: &Array,
        stride: (i32, i32),
        padding: (i32, i32),
        dilation: (i32, i32),
        groups: i32,
    ) -> Result<Array> {
        check_groups(groups)?;
        unless_empty(op!(mlx_conv2d(
            self.raw(),
            weight.raw(),
            stride.0,
            stride.1,
            padding.0,
            padding.1,
            dilation.0,
            dilation.1,
            groups,
        )))
    }

    /// `self` `[B, D, H, W, C]` with `weight` `[O, KD, KH, KW, C]`: `[B, D', H', W', O]`.
    /// Triples are (depth, height, width).
    ///
    /// # Errors
    /// When the shapes do not fit, or there are several groups.
    #[track_caller]
    pub fn conv3d(
        &self,
        weight: &Array,
        stride: (i32, i32, i32),
        padding: (i32, i32, i32),
        dilation: (i32, i32, i32),
        groups: i32,
    ) -> Result<Array> {
        check_groups(groups)?;
        unless_empty(op!(mlx_conv3d(
            self.raw(),
            weight.raw(),
            stride.0,
            stride.1,
            stride.2,
            padding.0,
            padding.1,
            padding.2,
            dilation.0,
            dilation.1,
            dilation.2,
            groups,
        )))
    }

    /// The transpose of [`conv1d`](Self::conv1d): `self` `[B, L, C]` with `weight` `[O, K, C]`
    /// gives `[B, stride * (L - 1) + dilation * (K - 1) + 1 + output_padding - 2 * padding, O]`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    #[track_caller]
    pub fn conv_transpose1d(
        &self,
        weight: &Array,
        stride: i32,
        padding: i32,
        dilation: i32,
        output_padding: i32,
        groups: i32,
    ) -> Result<Array> {
        check_groups(groups)?;
        unless_empty(op!(mlx_conv_transpose1d(
            self.raw(),
            weight.raw(),
            stride,
            padding,
            dilation,
            output_padding,
            groups,
        )))
    }
}

/// MLX divides by the number of groups before it looks at it.
fn check_groups(groups: i32) -> Result<()> {
    if groups > 0 {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Argument {
        argument: "groups",
        expected: "a positive number",
        found: groups.to_string(),
    }))
}
