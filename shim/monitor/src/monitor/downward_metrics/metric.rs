//! Metrics as vhostmd writes them: an XML document without a prolog.

use std::fmt::Write;

/// The subject of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Context {
    Host,
    Vm,
}

/// A value. Its type is an attribute of the metric.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Text(String),
    Int(i64),
    UInt(u64),
    Real(f64),
}

/// One metric.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Metric {
    pub(super) context: Context,
    pub(super) name: &'static str,
    pub(super) value: Value,
    /// `s` or `KiB`; empty without a unit.
    pub(super) unit: &'static str,
}

impl Metric {
    pub(super) fn host(name: &'static str, value: Value, unit: &'static str) -> Metric {
        Metric {
            context: Context::Host,
            name,
            value,
            unit,
        }
    }

    pub(super) fn vm(name: &'static str, value: Value, unit: &'static str) -> Metric {
        Metric {
            context: Context::Vm,
            ..Metric::host(name, value, unit)
        }
    }
}

/// The document of `metrics`, without a newline at its end.
pub(super) fn document(metrics: &[Metric]) -> String {
    let mut xml = String::from("<metrics>\n");
    for metric in metrics {
        let (kind, value) = match &metric.value {
            Value::Text(text) => ("string", escaped(text)),
            Value::Int(number) => ("int64", number.to_string()),
            Value::UInt(number) => ("uint64", number.to_string()),
            Value::Real(number) => ("real64", format!("{number:.6}")),
        };
        let context = match metric.context {
            Context::Host => "host",
            Context::Vm => "vm",
        };
        let unit = match metric.unit {
            "" => String::new(),
            unit => format!(" unit=\"{unit}\""),
        };
        // Writing to a string does not fail.
        let _ = write!(
            xml,
            "  <metric type=\"{kind}\" context=\"{context}\"{unit}>\n    <name>{name}</name>\n    \
             <value>{value}</value>\n  </metric>\n",
            name = metric.name
        );
    }
    xml + "</metrics>"
}

/// `text` as character data of XML, without control characters.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            letter if letter.is_control() => escaped.push('\u{fffd}'),
            letter => escaped.push(letter),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_is_what_vhostmds_clients_read() {
        let metrics = [
            Metric::host("HostName", Value::Text("a<b>&\n".into()), ""),
            Metric::vm("TotalCPUTime", Value::Real(1.25), "s"),
            Metric::host("Time", Value::Int(-1), "s"),
            Metric::vm("ResourceMemoryLimit", Value::UInt(u64::MAX), "KiB"),
        ];
        let expected = "\
<metrics>
  <metric type=\"string\" context=\"host\">
    <name>HostName</name>
    <value>a&lt;b&gt;&amp;\u{fffd}</value>
  </metric>
  <metric type=\"real64\" context=\"vm\" unit=\"s\">
    <name>TotalCPUTime</name>
    <value>1.250000</value>
  </metric>
  <metric type=\"int64\" context=\"host\" unit=\"s\">
    <name>Time</name>
    <value>-1</value>
  </metric>
  <metric type=\"uint64\" context=\"vm\" unit=\"KiB\">
    <name>ResourceMemoryLimit</name>
    <value>18446744073709551615</value>
  </metric>
</metrics>";
        assert_eq!(document(&metrics), expected);
        assert_eq!(document(&[]), "<metrics>\n</metrics>");
    }
}
