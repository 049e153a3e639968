//! What must hold of the header of a `.safetensors` file before anything it says is used. The `safetensors` crate checks
//! the same, but would take one of two tensors of a name, and has one sentence for several faults.
//!
//! A file is a length of 8 bytes, a header of that many bytes, and data. The header is an object of JSON: for every name a
//! dtype, a shape, and the first byte of its data and the one behind the last, counted from the start of the data. Every
//! byte of the data is one tensor's. Source: <https://github.com/huggingface/safetensors>, "Format".

use std::collections::BTreeSet;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::error::{Error, Result};

/// What the header says of a tensor.
#[derive(Deserialize)]
struct Entry {
    #[serde(skip)]
    name: String,
    dtype: String,
    shape: Vec<u64>,
    // A list of any length: that it has two numbers is for us to say.
    data_offsets: Vec<u64>,
}

/// All entries, and the first name that there are two of.
struct Entries(Vec<Entry>, Option<String>);

impl<'de> Visitor<'de> for Entries {
    type Value = Entries;

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> std::result::Result<Entries, A::Error> {
        let mut seen = BTreeSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
            } else {
                self.0.push(Entry { name: name.clone(), ..map.next_value()? });
            }
            if let Some(name) = seen.replace(name) {
                self.1.get_or_insert(name);
            }
        }
        Ok(self)
    }
}

/// What is wrong with the header of a file, if anything. What it allocates grows with the
/// length of the header that is there, with nothing that it says.
///
/// # Errors
/// A sentence for every fault, which names the tensor, what was expected and what was found.
pub(crate) fn check(file: &[u8]) -> Result<()> {
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(Error::new("the 8 bytes of its header's length are missing"));
    };
    let length = u64::from_le_bytes(*length);
    if length > rest.len() as u64 {
        return Err(Error::new(format!(
            "its header is said to have {length} bytes, of which there are {}",
            rest.len()
        )));
    }
    let (header, data) = rest.split_at(length as usize);
    let read = serde_json::Deserializer::from_slice(header).deserialize_map(Entries(vec![], None));
    let Entries(mut entries, twice) = read.map_err(|e| Error::new("its header cannot be read").because(e))?;
    if let Some(name) = twice {
        return Err(Error::new(format!("its header names `{name}` twice")));
    }
    for entry in &entries {
        entry.check()?;
    }
    entries.sort_by(|a, b| a.data_offsets.cmp(&b.data_offsets));
    let (mut end, mut before) = (0, "");
    for Entry { name, data_offsets, .. } in &entries {
        let start = data_offsets[0];
        if start < end {
            let found =
                format!("tensor `{name}` starts at byte {start}, inside of `{before}`, which ends at byte {end}");
            return Err(Error::new(found));
        }
        if start > end {
            return Err(Error::new(format!("bytes {end}..{start}, before tensor `{name}`, are no tensor's")));
        }
        (end, before) = (data_offsets[1], name);
    }
    if end != data.len() as u64 {
        let found = data.len();
        return Err(Error::new(format!("its tensors need {end} bytes of data, of which there are {found}")));
    }
    Ok(())
}

impl Entry {
    /// What is wrong with this entry alone.
    fn check(&self) -> Result<()> {
        let Entry { name, dtype, shape, data_offsets } = self;
        let &[start, end] = data_offsets.as_slice() else {
            let found =
                format!("tensor `{name}` has the data_offsets {data_offsets:?}; expected a first byte and an end");
            return Err(Error::new(found));
        };
        if end < start {
            return Err(Error::new(format!("tensor `{name}` ends at byte {end}, before it starts at byte {start}")));
        }
        let count = shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim));
        let size = match dtype.as_str() {
            "BF16" => 2,
            "F32" | "U32" => 4,
            "F64" | "I64" => 8,
            // What tensors cannot have is told by whoever makes them of it.
            _ => return Ok(()),
        };
        let Some(needed) = count.and_then(|n| n.checked_mul(size)) else {
            return Err(Error::new(format!("tensor `{name}` has the shape {shape:?}: more bytes than can be counted")));
        };
        if needed != end - start {
            let found = end - start;
            return Err(Error::new(format!(
                "tensor `{name}`, {dtype} of shape {shape:?}, needs {needed} bytes; its data_offsets have {found}"
            )));
        }
        Ok(())
    }
}
