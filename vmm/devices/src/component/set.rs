//! The components of a machine, in order and under stable names.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Component, ComponentState, RestoreError, SaveError};
use crate::page_log::PageLog;

/// The states of a set of components, each under its name.
pub type ComponentStates = BTreeMap<String, ComponentState>;

/// The place of a component in the order. Components of one stage are in the order of their insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// A clock of the time that the guest runs. It stops before the functions, whose requests in flight take time to
    /// complete, and starts after them.
    Clock,
    /// A function on a bus.
    Function,
    /// A bus, which takes the addresses of its functions from them.
    Bus,
    /// All else.
    Platform,
}

/// The components of a machine.
///
/// They are reset, paused, saved and restored in the order of [`Stage`], and resume in the opposite order: a function
/// that resumes finds its bus.
#[derive(Default)]
pub struct Components(Vec<(Stage, String, Arc<dyn Component>)>);

impl std::fmt::Debug for Components {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

/// Errors of a set of components.
#[derive(Debug, thiserror::Error)]
pub enum ComponentError {
    /// Two components have one name.
    #[error("two components of the machine have the name {0:?}")]
    Duplicate(String),
    /// A component cannot be saved.
    #[error("cannot save {name}")]
    Save {
        /// The component.
        name: String,
        /// The cause.
        source: SaveError,
    },
    /// A component cannot be restored.
    #[error("cannot restore {name}")]
    Restore {
        /// The component.
        name: String,
        /// The cause.
        source: RestoreError,
    },
    /// A state is missing.
    #[error("cannot restore {0}: there is no state of it")]
    Missing(String),
    /// The machine lacks a component.
    #[error("cannot restore {0}: the machine has no such component")]
    Unknown(String),
}

impl Components {
    /// The names of the components, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(_, name, _)| name.as_str())
    }

    /// Adds a component.
    ///
    /// # Errors
    /// Another component has this name.
    pub fn insert(
        &mut self,
        stage: Stage,
        name: impl Into<String>,
        component: Arc<dyn Component>,
    ) -> Result<(), ComponentError> {
        let name = name.into();
        if self.names().any(|used| used == name) {
            return Err(ComponentError::Duplicate(name));
        }
        let at = self.0.partition_point(|(other, ..)| *other <= stage);
        self.0.insert(at, (stage, name, component));
        Ok(())
    }

    /// Removes a component. Returns false if there is none of this name.
    pub fn remove(&mut self, name: &str) -> bool {
        let before = self.0.len();
        self.0.retain(|(_, other, _)| other != name);
        self.0.len() != before
    }

    /// Removes the components of a stage.
    pub fn remove_stage(&mut self, stage: Stage) {
        self.0.retain(|(other, ..)| *other != stage);
    }

    /// Resets the components of a stage.
    pub fn reset_stage(&self, stage: Stage) {
        let of_stage = self.0.iter().filter(|(other, ..)| *other == stage);
        of_stage.for_each(|(.., component)| component.reset());
    }

    fn in_order(&self) -> impl DoubleEndedIterator<Item = (&String, &Arc<dyn Component>)> {
        self.0.iter().map(|(_, name, component)| (name, component))
    }

    /// Resets each component.
    pub fn reset(&self) {
        self.in_order().for_each(|(_, component)| component.reset());
    }

    /// Pauses each component.
    pub fn pause(&self) {
        self.in_order().for_each(|(_, component)| component.pause());
    }

    /// Resumes each component.
    pub fn resume(&self) {
        self.in_order()
            .rev()
            .for_each(|(_, component)| component.resume());
    }

    /// Has each component mark in `log` what the kernel writes for it ([`Component::log_pages`]).
    pub fn log_pages(&self, log: Option<&Arc<PageLog>>) {
        self.in_order()
            .for_each(|(_, component)| component.log_pages(log));
    }

    /// Saves each component. All are paused.
    ///
    /// # Errors
    /// Names the first component that cannot be saved.
    pub fn save(&self) -> Result<ComponentStates, ComponentError> {
        let save = |(name, component): (&String, &Arc<dyn Component>)| match component.save() {
            Ok(state) => Ok((name.clone(), state)),
            Err(source) => Err(ComponentError::Save {
                name: name.clone(),
                source,
            }),
        };
        self.in_order().map(save).collect()
    }

    /// Restores each component and leaves all of them paused.
    ///
    /// # Errors
    /// The states are not those of the same components, or one is refused. Components before the one that is named have
    /// their saved states then: reset or drop all of them.
    pub fn restore(&self, states: &ComponentStates) -> Result<(), ComponentError> {
        if let Some(name) = states.keys().find(|name| !self.names().any(|n| n == *name)) {
            return Err(ComponentError::Unknown(name.clone()));
        }
        if let Some(name) = self.names().find(|name| !states.contains_key(*name)) {
            return Err(ComponentError::Missing(name.to_owned()));
        }
        for (name, component) in self.in_order() {
            let Some(state) = states.get(name) else { continue };
            component
                .restore(state)
                .map_err(|source| ComponentError::Restore {
                    name: name.clone(),
                    source,
                })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;
    use std::sync::Mutex;

    use super::*;
    use crate::component::check;

    type Log = Arc<Mutex<Vec<String>>>;

    /// A component that holds a number below 100.
    struct Counter {
        name: &'static str,
        value: Mutex<u8>,
        log: Log,
    }

    impl Counter {
        fn note(&self, what: &str) {
            self.log.lock().unwrap().push(format!("{what} {}", self.name));
        }
    }

    impl Component for Counter {
        fn reset(&self) {
            self.note("reset");
            *self.value.lock().unwrap() = 0;
        }
        fn pause(&self) {
            self.note("pause");
        }
        fn resume(&self) {
            self.note("resume");
        }
        fn save(&self) -> Result<ComponentState, SaveError> {
            let value = *self.value.lock().unwrap();
            if value == 13 {
                return Err(SaveError::Refused("13 is no number".into()));
            }
            ComponentState::new(&value)
        }
        fn restore(&self, state: &ComponentState) -> Result<(), RestoreError> {
            self.note("restore");
            let value: u8 = state.parse()?;
            check(value < 100, "value", "is above 99")?;
            *self.value.lock().unwrap() = value;
            Ok(())
        }
    }

    fn set(values: [u8; 3]) -> (Components, [Arc<Counter>; 3], Log) {
        let log = Log::default();
        let names = ["rtc", "pci", "disk"];
        let component = |at: usize| {
            let value = Mutex::new(values[at]);
            Arc::new(Counter {
                name: names[at],
                value,
                log: log.clone(),
            })
        };
        let components = [component(0), component(1), component(2)];
        let mut set = Components::default();
        let stages = [Stage::Platform, Stage::Bus, Stage::Function];
        for (component, stage) in components.iter().zip(stages) {
            set.insert(stage, component.name, component.clone()).unwrap();
        }
        (set, components, log)
    }

    #[test]
    fn parts_are_visited_in_order_and_resume_in_the_opposite_order() {
        let (set, _, log) = set([1, 2, 3]);
        set.pause();
        set.resume();
        set.reset();
        set.reset_stage(Stage::Bus);
        let expected = [
            "pause disk",
            "pause pci",
            "pause rtc",
            "resume rtc",
            "resume pci",
            "resume disk",
            "reset disk",
            "reset pci",
            "reset rtc",
            "reset pci",
        ];
        assert_eq!(*log.lock().unwrap(), expected);
    }

    #[test]
    fn a_clock_stops_before_all_else_and_starts_last() {
        let (mut set, [clock, ..], log) = set([0; 3]);
        set.remove("rtc");
        set.insert(Stage::Clock, "watchdog", clock).unwrap();
        set.pause();
        set.resume();
        let expected = [
            "pause rtc",
            "pause disk",
            "pause pci",
            "resume pci",
            "resume disk",
            "resume rtc",
        ];
        assert_eq!(*log.lock().unwrap(), expected);
    }

    #[test]
    fn a_part_that_is_added_later_stands_with_its_stage() {
        let (mut set, [rtc, ..], _) = set([0; 3]);
        set.insert(Stage::Function, "net", rtc.clone()).unwrap();
        assert_eq!(set.names().collect::<Vec<_>>(), ["disk", "net", "pci", "rtc"]);
        let twice = set.insert(Stage::Bus, "net", rtc).unwrap_err();
        assert!(matches!(twice, ComponentError::Duplicate(name) if name == "net"));
        assert!(set.remove("net") && !set.remove("net"));
        set.remove_stage(Stage::Function);
        assert_eq!(set.names().collect::<Vec<_>>(), ["pci", "rtc"]);
    }

    #[test]
    fn a_set_that_is_built_anew_takes_the_states() {
        let (old, ..) = set([1, 2, 3]);
        let text = serde_json::to_string(&old.save().unwrap()).unwrap();
        assert_eq!(text, r#"{"disk":3,"pci":2,"rtc":1}"#);
        let (new, components, _) = set([0; 3]);
        new.restore(&serde_json::from_str(&text).unwrap()).unwrap();
        assert_eq!(
            components.map(|component| *component.value.lock().unwrap()),
            [1, 2, 3]
        );
    }

    #[test]
    fn errors_name_the_part() {
        let (set, components, log) = set([1, 13, 3]);
        let refused = set.save().unwrap_err();
        assert_eq!(refused.to_string(), "cannot save pci");
        assert_eq!(refused.source().unwrap().to_string(), "13 is no number");
        *components[1].value.lock().unwrap() = 2;
        let good = set.save().unwrap();
        let spoilt = |change: &dyn Fn(&mut ComponentStates)| {
            let mut states = good.clone();
            change(&mut states);
            set.restore(&states).unwrap_err()
        };
        let missing = spoilt(&|states| drop(states.remove("rtc")));
        assert!(missing.to_string().starts_with("cannot restore rtc: "));
        let unknown = spoilt(&|states| drop(states.insert("gpu".into(), ComponentState::default())));
        assert!(unknown.to_string().starts_with("cannot restore gpu: "));
        assert!(log.lock().unwrap().is_empty(), "nothing was restored");
        let wrong = spoilt(&|states| drop(states.insert("pci".into(), serde_json::json!(100).into())));
        assert_eq!(wrong.to_string(), "cannot restore pci");
        assert_eq!(
            wrong.source().unwrap().to_string(),
            "field \"value\": is above 99"
        );
    }
}
