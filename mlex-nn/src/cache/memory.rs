//! Keys and values outside of MLX's graph, for operations on the CPU.
//!
//! A cache of arrays costs two inputs and two outputs of the graph for each layer and step, and
//! a step could not be queued while the one before still computes: until then its arrays are
//! referred to, and a write to them would copy them. Memory of our own is written by the steps
//! of sequences alone, in the order in which they run; each says which node it has to follow.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mlex_core::{Array, Dtype, HostBuffer, HostConstant, HostView};
use mlex_kernels::{Element, PackedRow, pack_rows};

use super::KvPacking;
use crate::host::kernel_error;

/// Keys and values `[B, H_kv, capacity, D]`; packed ones are uint32 `[.., words]`.
#[derive(Debug)]
pub(crate) struct KvMemory {
    buffers: Mutex<[HostBuffer; 2]>,
    pub(crate) shape: [i32; 4],
    pub(crate) dtype: Dtype,
    pub(crate) packing: Option<KvPacking>,
    /// Positions that steps have been planned to write.
    end: AtomicI32,
}

impl KvMemory {
    fn new(shape: [i32; 4], dtype: Dtype, packing: Option<KvPacking>, end: i32) -> Self {
        Self {
            buffers: Mutex::default(),
            shape,
            dtype,
            packing,
            end: AtomicI32::new(end),
        }
    }

    /// The buffers, of undefined size before the first step.
    pub(crate) fn lock(&self) -> MutexGuard<'_, [HostBuffer; 2]> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The width and type of keys and values, packed or not.
    pub(crate) fn vectors(&self) -> (i32, Dtype) {
        match &self.packing {
            Some(packing) => (packing.dims[0], packing.dtype),
            None => (self.shape[3], self.dtype),
        }
    }

    /// The bytes of keys and values.
    pub(crate) fn nbytes(&self) -> usize {
        let count: usize = self.shape.iter().map(|&dim| dim as usize).product();
        2 * count * self.dtype.size_in_bytes()
    }
}

/// The node that wrote to a memory last.
#[derive(Clone, Debug)]
pub(crate) struct Marker {
    id: u64,
    /// One of its outputs.
    pub(crate) array: Array,
}

impl Marker {
    /// Of a node that has this output.
    pub(crate) fn new(array: &Array) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            array: array.clone(),
        }
    }

    /// Whether both are the same node.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

/// Held by all that refer to a memory and need what is in it: caches, and steps that are not done.
/// A cache that has taken back positions may write over them where nothing else does: a step may
/// run later than one that was recorded after it.
type Owner = Arc<()>;

/// A cache's part of a memory, which its clones share until one of them goes another way.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    pub(crate) memory: Arc<KvMemory>,
    owner: Owner,
    /// Positions in use.
    pub(crate) used: i32,
    pub(crate) marker: Marker,
}

/// Where the content of a memory comes from that a step writes to first.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Memory(Arc<KvMemory>, #[allow(dead_code, reason = "held")] Owner),
    /// Keys and values.
    Arrays(Arc<[HostConstant; 2]>),
}

/// Positions that a new memory starts with: the first `sinks`, and the last ones before `end`,
/// `count` together.
#[derive(Clone, Debug)]
pub(crate) struct Carry {
    pub(crate) source: Source,
    pub(crate) sinks: i32,
    pub(crate) end: i32,
    pub(crate) count: i32,
}

/// What a step writes to.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) memory: Arc<KvMemory>,
    owner: Owner,
    /// The step is the first to write to the memory; it may carry positions over.
    pub(crate) fresh: Option<Option<Carry>>,
    /// Positions in use before.
    pub(crate) used: i32,
}

/// How a step adds positions.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) target: Target,
}

impl Plan {
    /// `new` positions in a memory of its own, for `shape` `[B, H_kv, capacity, D]`.
    pub(crate) fn fresh(
        shape: [i32; 4],
        dtype: Dtype,
        packing: Option<KvPacking>,
        carry: Option<Carry>,
        new: i32,
    ) -> Self {
        let used = carry.as_ref().map_or(0, |carry| carry.count);
        Self {
            target: Target {
                memory: Arc::new(KvMemory::new(shape, dtype, packing, used + new)),
                owner: Owner::default(),
                fresh: Some(carry),
                used,
            },
        }
    }

    /// The memory after the step, whose node is `marker`, has written `new` positions.
    pub(crate) fn done(&self, new: i32, marker: Marker) -> Shared {
        let Target {
            memory,
            owner,
            used,
            ..
        } = &self.target;
        Shared {
            memory: Arc::clone(memory),
            owner: Arc::clone(owner),
            used: used + new,
            marker,
        }
    }
}

impl Shared {
    /// A plan to write behind the positions in use, where there is room and nothing else has
    /// written, or will, or needs what was there.
    pub(crate) fn append(&self, new: i32) -> Option<Plan> {
        let after = self.used + new;
        if after > self.memory.shape[2] {
            return None;
        }
        let end = &self.memory.end;
        let last = end.compare_exchange(self.used, after, Ordering::Relaxed, Ordering::Relaxed);
        if last.is_err() {
            if Arc::strong_count(&self.owner) > 1 {
                return None;
            }
            end.store(after, Ordering::Relaxed);
        }
        Some(Plan {
            target: Target {
                memory: Arc::clone(&self.memory),
                owner: Arc::clone(&self.owner),
                fresh: None,
                used: self.used,
            },
        })
    }

    /// A plan to go on in a memory of `capacity`, with the first `sinks` and the last positions,
    /// `keep` together.
    pub(crate) fn moved(&self, capacity: i32, sinks: i32, keep: i32, new: i32) -> Plan {
        let [batch, heads, _, dim] = self.memory.shape;
        let carry = Carry {
            source: Source::Memory(Arc::clone(&self.memory), Arc::clone(&self.owner)),
            sinks: sinks.min(keep),
            end: self.used,
            count: keep,
        };
        let shape = [batch, heads, capacity, dim];
        let KvMemory { dtype, packing, .. } = *self.memory;
        Plan::fresh(shape, dtype, packing, Some(carry), new)
    }

    /// The same, packed, in a memory of its own; computed now.
    pub(crate) fn packed(&self, packing: &KvPacking) -> crate::Result<Self> {
        self.marker.array.eval()?;
        let [batch, heads, capacity, dim] = self.memory.shape;
        let row = packing.row(dim)?;
        let shape = [batch, heads, capacity, row.words() as i32];
        let memory = KvMemory::new(shape, Dtype::Uint32, Some(*packing), self.used);
        {
            let (from, mut to) = (self.memory.lock(), memory.lock());
            for (from, to) in from.iter().zip(to.iter_mut()) {
                to.resize(&shape, Dtype::Uint32)?;
                let mut to = to.view_mut();
                pack_all(from.view(), to.as_mut_slice::<u32>()?, row)?;
            }
        }
        Ok(Self {
            memory: Arc::new(memory),
            owner: Owner::default(),
            used: self.used,
            marker: self.marker.clone(),
        })
    }

    /// Keys and values as arrays `[B, H_kv, capacity, D]`, computed now.
    pub(crate) fn to_arrays(&self) -> mlex_core::Result<[Array; 2]> {
        self.marker.array.eval()?;
        // Copied before MLX is called: a thread that evaluates holds it, and waits for a step that
        // may wait for the buffers.
        let copied = self
            .memory
            .lock()
            .each_ref()
            .map(|buffer| buffer.view().as_bytes().to_vec());
        let array = |bytes: &[u8]| Array::from_bytes(bytes, &self.memory.shape, self.memory.dtype);
        Ok([array(&copied[0])?, array(&copied[1])?])
    }
}

/// Packs all vectors, whatever is in those that are not in use.
fn pack_all(from: HostView<'_>, to: &mut [u32], row: PackedRow) -> mlex_core::Result<()> {
    fn all<T: Element + mlex_core::Element>(
        from: &HostView<'_>,
        to: &mut [u32],
        row: PackedRow,
    ) -> mlex_core::Result<()> {
        pack_rows(to, from.as_slice::<T>()?, row).map_err(kernel_error("pack"))
    }
    match from.dtype() {
        Dtype::Float16 => all::<half::f16>(&from, to, row),
        Dtype::Bfloat16 => all::<half::bf16>(&from, to, row),
        _ => all::<f32>(&from, to, row),
    }
}
