//! Metrics as text: families of samples that are computed for each scrape, in the OpenMetrics format that Prometheus
//! reads.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

/// Type of the text.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A metric. The name of a counter is without `_total`, which the text has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Metric {
    name: &'static str,
    help: &'static str,
    is_counter: bool,
}

impl Metric {
    pub(super) const fn counter(name: &'static str, help: &'static str) -> Metric {
        let is_counter = true;
        Metric {
            name,
            help,
            is_counter,
        }
    }

    pub(super) const fn gauge(name: &'static str, help: &'static str) -> Metric {
        let is_counter = false;
        Metric {
            name,
            help,
            is_counter,
        }
    }
}

/// Value of a sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Number {
    Whole(u64),
    Seconds(f64),
}

impl Number {
    pub(super) fn from_ns(nanoseconds: u64) -> Number {
        Number::Seconds(nanoseconds as f64 / 1e9)
    }

    fn encode(self, sample: &mut MetricEncoder<'_>, is_counter: bool) -> fmt::Result {
        match (is_counter, self) {
            (true, Number::Whole(value)) => sample.encode_counter::<NoLabelSet, _, u64>(&value, None),
            (true, Number::Seconds(value)) => sample.encode_counter::<NoLabelSet, _, u64>(&value, None),
            (false, Number::Whole(value)) => sample.encode_gauge(&value),
            (false, Number::Seconds(value)) => sample.encode_gauge(&value),
        }
    }
}

/// Names and values of labels.
pub(super) type Labels = Vec<(String, String)>;

/// All samples of a scrape, by metric.
#[derive(Debug, Default)]
pub(super) struct Samples(Vec<(Metric, Vec<(Labels, Number)>)>);

impl Samples {
    /// Adds a sample. A metric has one for each set of labels.
    pub(super) fn add(&mut self, metric: Metric, labels: Labels, number: Number) {
        let family = self.0.iter_mut().find(|(present, _)| *present == metric);
        match family {
            Some((_, samples)) => samples.push((labels, number)),
            None => self.0.push((metric, vec![(labels, number)])),
        }
    }

    /// The text of all samples.
    pub(super) fn text(self) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        // A string takes any text.
        let _ = encode(&mut text, &registry);
        text
    }
}

impl Collector for Samples {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        for (metric, samples) in &self.0 {
            let kind = match metric.is_counter {
                true => MetricType::Counter,
                false => MetricType::Gauge,
            };
            let mut family = encoder.encode_descriptor(metric.name, metric.help, None, kind)?;
            for (labels, number) in samples {
                match labels.is_empty() {
                    true => number.encode(&mut family, metric.is_counter)?,
                    false => number.encode(&mut family.encode_family(labels)?, metric.is_counter)?,
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_a_metric_are_together_and_escaped() {
        let total = Metric::counter("husk_things", "Things");
        let size = Metric::gauge("husk_size_bytes", "Size");
        let label = |value: &str| vec![("name".to_owned(), value.to_owned())];
        let mut samples = Samples::default();
        samples.add(total, label("a\"\n"), Number::Whole(u64::MAX));
        samples.add(size, Vec::new(), Number::Whole(7));
        samples.add(total, label("b"), Number::from_ns(1_500_000_000));
        assert_eq!(
            samples.text(),
            "# HELP husk_things Things\n\
             # TYPE husk_things counter\n\
             husk_things_total{name=\"a\\\"\\n\"} 18446744073709551615\n\
             husk_things_total{name=\"b\"} 1.5\n\
             # HELP husk_size_bytes Size\n\
             # TYPE husk_size_bytes gauge\n\
             husk_size_bytes 7\n\
             # EOF\n"
        );
    }
}
