//! Keys and values outside of MLX's graph, for operations on the CPU.
//!
//! A cache of arrays costs two inputs and two outputs of the graph for each layer and step, and
//! a step could not be queued while the one before still computes: until then its arrays are
//! referred to, and a write to them would copy them. Memory of our own is written by the steps
//! of sequences alone, in the order in which they run; each says which node it has to follow.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mlex_core::{Array, Dtype, HostBuffer, HostConstant};

/// Keys and values `[B, H_kv, capacity, D]`.
#[derive(Debug)]
pub(crate) struct KvMemory {
    buffers: Mutex<[HostBuffer; 2]>,
    pub(crate) shape: [i32; 4],
    pub(crate) dtype: Dtype,
    /// Positions that steps have been recorded to write.
    end: AtomicI32,
}

impl KvMemory {
    fn new(shape: [i32; 4], dtype: Dtype) -> Self {
        Self {
            buffers: Mutex::default(),
            shape,
            dtype,
            end: AtomicI32::new(0),
        }
    }

    /// The buffers, of undefined size before the first step.
    pub(crate) fn lock(&self) -> MutexGuard<'_, [HostBuffer; 2]> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
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

/// A cache's part of a memory, which its clones share until one of them goes another way.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    pub(crate) memory: Arc<KvMemory>,
    /// The caches that refer to the memory have clones of this, and steps do not.
    owner: Arc<()>,
    /// Positions in use.
    pub(crate) used: i32,
    pub(crate) marker: Marker,
}

/// Where the content of a memory comes from that a step writes to first.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Memory(Arc<KvMemory>),
    /// Keys and values.
    Arrays(Arc<[HostConstant; 2]>),
}

/// Positions that a new memory starts with.
#[derive(Clone, Debug)]
pub(crate) struct Carry {
    pub(crate) source: Source,
    pub(crate) first: i32,
    pub(crate) count: i32,
}

/// What a step writes to.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) memory: Arc<KvMemory>,
    /// The step is the first to write to the memory; it may carry positions over.
    pub(crate) fresh: Option<Option<Carry>>,
    /// Positions in use before.
    pub(crate) used: i32,
}

/// How a step adds positions.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) target: Target,
    owner: Arc<()>,
}

impl Plan {
    /// A memory of its own, for `shape` `[B, H_kv, capacity, D]`.
    pub(crate) fn fresh(shape: [i32; 4], dtype: Dtype, carry: Option<Carry>) -> Self {
        Self {
            target: Target {
                memory: Arc::new(KvMemory::new(shape, dtype)),
                used: carry.as_ref().map_or(0, |carry| carry.count),
                fresh: Some(carry),
            },
            owner: Arc::default(),
        }
    }

    /// The memory after the step, whose node is `marker`, has written `new` positions.
    pub(crate) fn done(&self, new: i32, marker: Marker) -> Shared {
        let Target { memory, used, .. } = &self.target;
        let used = used + new;
        memory.end.store(used, Ordering::Relaxed);
        Shared {
            memory: Arc::clone(memory),
            owner: Arc::clone(&self.owner),
            used,
            marker,
        }
    }
}

impl Shared {
    /// A plan to write behind the positions in use, where there is room and no other cache has
    /// written there.
    pub(crate) fn append(&self, new: i32) -> Option<Plan> {
        let free = self.used + new <= self.memory.shape[2];
        let last = self.used == self.memory.end.load(Ordering::Relaxed);
        let alone = Arc::strong_count(&self.owner) == 1;
        (free && (last || alone)).then(|| Plan {
            target: Target {
                memory: Arc::clone(&self.memory),
                fresh: None,
                used: self.used,
            },
            owner: Arc::clone(&self.owner),
        })
    }

    /// A plan to go on in a memory of `capacity`, with the last `keep` positions.
    pub(crate) fn moved(&self, capacity: i32, keep: i32) -> Plan {
        let [batch, heads, _, dim] = self.memory.shape;
        let carry = Carry {
            source: Source::Memory(Arc::clone(&self.memory)),
            first: self.used - keep,
            count: keep,
        };
        let shape = [batch, heads, capacity, dim];
        Plan::fresh(shape, self.memory.dtype, Some(carry))
    }

    /// Keys and values as arrays `[B, H_kv, capacity, D]`, computed now.
    pub(crate) fn to_arrays(&self) -> mlex_core::Result<[Array; 2]> {
        self.marker.array.eval()?;
        let buffers = self.memory.lock();
        let array = |buffer: &HostBuffer| {
            let bytes = buffer.view().as_bytes();
            Array::from_bytes(bytes, &self.memory.shape, self.memory.dtype)
        };
        Ok([array(&buffers[0])?, array(&buffers[1])?])
    }
}
