//! Element types and reduction operations by name, and their values on the host.

use half::{bf16, f16};
use nccl_sys::types::*;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// An element type that ranks can make and check on the host. In JSON it is its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Element {
    pub name: &'static str,
    pub code: ncclDataType_t,
}

/// Every element type, by the names that nccl-tests uses.
pub const ELEMENTS: &[Element] = &[
    Element { name: "int8", code: ncclInt8 },
    Element { name: "uint8", code: ncclUint8 },
    Element { name: "int32", code: ncclInt32 },
    Element { name: "uint32", code: ncclUint32 },
    Element { name: "int64", code: ncclInt64 },
    Element { name: "uint64", code: ncclUint64 },
    Element { name: "half", code: ncclFloat16 },
    Element { name: "float", code: ncclFloat32 },
    Element { name: "double", code: ncclFloat64 },
    Element { name: "bfloat16", code: ncclBfloat16 },
];

/// The element type with a code; the code must be one of [`ELEMENTS`].
pub fn element(code: ncclDataType_t) -> Element {
    *ELEMENTS.iter().find(|element| element.code == code).expect("a code of ELEMENTS")
}

impl Element {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        self.code.size_bytes().expect("every type of ELEMENTS has a size")
    }

    /// Values as bytes. Values that the type cannot hold are cut as Rust's `as` cuts them.
    pub fn encode(self, values: &[f64]) -> Vec<u8> {
        fn all<const N: usize>(values: &[f64], one: impl Fn(f64) -> [u8; N]) -> Vec<u8> {
            values.iter().flat_map(|value| one(*value)).collect()
        }
        match self.code {
            ncclInt8 => all(values, |value| (value as i8).to_ne_bytes()),
            ncclUint8 => all(values, |value| (value as u8).to_ne_bytes()),
            ncclInt32 => all(values, |value| (value as i32).to_ne_bytes()),
            ncclUint32 => all(values, |value| (value as u32).to_ne_bytes()),
            ncclInt64 => all(values, |value| (value as i64).to_ne_bytes()),
            ncclUint64 => all(values, |value| (value as u64).to_ne_bytes()),
            ncclFloat16 => all(values, |value| f16::from_f64(value).to_ne_bytes()),
            ncclFloat32 => all(values, |value| (value as f32).to_ne_bytes()),
            ncclFloat64 => all(values, f64::to_ne_bytes),
            ncclBfloat16 => all(values, |value| bf16::from_f64(value).to_ne_bytes()),
            other => unreachable!("type code {}", other.0),
        }
    }

    /// Bytes as values.
    pub fn decode(self, bytes: &[u8]) -> Vec<f64> {
        fn all<const N: usize>(bytes: &[u8], one: impl Fn([u8; N]) -> f64) -> Vec<f64> {
            bytes.as_chunks::<N>().0.iter().map(|chunk| one(*chunk)).collect()
        }
        match self.code {
            ncclInt8 => all(bytes, |bytes| f64::from(i8::from_ne_bytes(bytes))),
            ncclUint8 => all(bytes, |bytes| f64::from(u8::from_ne_bytes(bytes))),
            ncclInt32 => all(bytes, |bytes| f64::from(i32::from_ne_bytes(bytes))),
            ncclUint32 => all(bytes, |bytes| f64::from(u32::from_ne_bytes(bytes))),
            ncclInt64 => all(bytes, |bytes| i64::from_ne_bytes(bytes) as f64),
            ncclUint64 => all(bytes, |bytes| u64::from_ne_bytes(bytes) as f64),
            ncclFloat16 => all(bytes, |bytes| f16::from_ne_bytes(bytes).to_f64()),
            ncclFloat32 => all(bytes, |bytes| f64::from(f32::from_ne_bytes(bytes))),
            ncclFloat64 => all(bytes, f64::from_ne_bytes),
            ncclBfloat16 => all(bytes, |bytes| bf16::from_ne_bytes(bytes).to_f64()),
            other => unreachable!("type code {}", other.0),
        }
    }

    /// The relative distance of neighbouring values near 1; 0 for integers.
    pub fn epsilon(self) -> f64 {
        match self.code {
            ncclFloat16 => f16::EPSILON.to_f64(),
            ncclBfloat16 => bf16::EPSILON.to_f64(),
            ncclFloat32 => f64::from(f32::EPSILON),
            ncclFloat64 => f64::EPSILON,
            _ => 0.0,
        }
    }

    pub fn is_integer(self) -> bool {
        self.epsilon() == 0.0
    }
}

impl fmt::Display for Element {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name)
    }
}

impl FromStr for Element {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let name = match text {
            "f16" | "fp16" | "float16" => "half",
            "f32" | "fp32" | "float32" => "float",
            "f64" | "fp64" | "float64" => "double",
            "bf16" => "bfloat16",
            other => other,
        };
        ELEMENTS.iter().find(|element| element.name == name).copied().ok_or_else(|| {
            let names: Vec<&str> = ELEMENTS.iter().map(|element| element.name).collect();
            format!("no element type {text:?}; one of {}", names.join(", "))
        })
    }
}

impl Serialize for Element {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A reduction operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reduction {
    pub name: &'static str,
    pub code: ncclRedOp_t,
}

/// Every built-in operation.
pub const REDUCTIONS: &[Reduction] = &[
    Reduction { name: "sum", code: ncclSum },
    Reduction { name: "prod", code: ncclProd },
    Reduction { name: "max", code: ncclMax },
    Reduction { name: "min", code: ncclMin },
    Reduction { name: "avg", code: ncclAvg },
];

/// The sum.
pub const SUM: Reduction = REDUCTIONS[0];
/// The maximum.
pub const MAX: Reduction = REDUCTIONS[2];

impl Reduction {
    /// The result over all ranks' values of one element. Averages of integers divide towards zero.
    pub fn of(self, element: Element, values: impl ExactSizeIterator<Item = f64>) -> f64 {
        let ranks = values.len() as f64;
        let combined = match self.code {
            ncclProd => values.product(),
            ncclMax => values.fold(f64::NEG_INFINITY, f64::max),
            ncclMin => values.fold(f64::INFINITY, f64::min),
            _ => values.sum::<f64>(),
        };
        match self.code {
            ncclAvg if element.is_integer() => (combined / ranks).trunc(),
            ncclAvg => combined / ranks,
            _ => combined,
        }
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name)
    }
}

impl FromStr for Reduction {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        REDUCTIONS.iter().find(|reduction| reduction.name == text).copied().ok_or_else(|| {
            let names: Vec<&str> = REDUCTIONS.iter().map(|reduction| reduction.name).collect();
            format!("no reduction {text:?}; one of {}", names.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small integers survive every type.
    #[test]
    fn small_integers_are_exact() {
        let values: Vec<f64> = (0..100).map(f64::from).collect();
        for element in ELEMENTS {
            let bytes = element.encode(&values);
            assert_eq!(bytes.len(), values.len() * element.bytes(), "{element}");
            assert_eq!(element.decode(&bytes), values, "{element}");
        }
    }

    /// Names are found with their short forms; others list what there is.
    #[test]
    fn names() {
        assert_eq!("bf16".parse::<Element>().unwrap().code, ncclBfloat16);
        assert_eq!("float".parse::<Element>().unwrap().code, ncclFloat32);
        assert_eq!(serde_json::to_value(element(ncclFloat16)).unwrap(), "half");
        assert_eq!(serde_json::from_str::<Element>("\"half\"").unwrap().code, ncclFloat16);
        assert!("quad".parse::<Element>().unwrap_err().contains("bfloat16"));
        assert!("mean".parse::<Reduction>().unwrap_err().contains("avg"));
    }

    /// Averages divide: towards zero for integers, exactly otherwise.
    #[test]
    fn averages() {
        let avg: Reduction = "avg".parse().unwrap();
        assert_eq!(avg.of(element(ncclInt32), [1.0, 2.0].into_iter()), 1.0);
        assert_eq!(avg.of(element(ncclFloat32), [1.0, 2.0].into_iter()), 1.5);
    }
}
