//! Weights as the steps of a sequence read them.

use std::sync::{Arc, OnceLock};

use mlex_core::{Array, HostConstant};

/// The memory of some weights, found when it is first asked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Constants(OnceLock<Arc<[HostConstant]>>);

impl Constants {
    /// That of `arrays`, which are the same in every call.
    pub(crate) fn of<'a>(
        &self,
        arrays: impl IntoIterator<Item = &'a Array>,
    ) -> mlex_core::Result<Arc<[HostConstant]>> {
        if let Some(constants) = self.0.get() {
            return Ok(Arc::clone(constants));
        }
        let constants = arrays.into_iter().map(HostConstant::new);
        let constants: Arc<[HostConstant]> = constants.collect::<Result<_, _>>()?;
        constants.iter().for_each(HostConstant::prefer_huge_pages);
        Ok(Arc::clone(self.0.get_or_init(|| constants)))
    }
}
